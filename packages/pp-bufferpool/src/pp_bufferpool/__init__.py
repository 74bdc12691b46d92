"""Receive buffers of a pipeline by lifetime instead of by microbatch.

Names are imported on first use, so that the arithmetic (lifetimes, slots) costs no import of
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_bufferpool.lifetimes import (
        Lifetime,
        Slots,
        assign_slots,
        max_overlap,
        recv_lifetimes,
    )
    from pp_bufferpool.pool import (
        PoolStats,
        RecvBufferCounts,
        RecvBufferPool,
        install_recv_buffer_pool,
        recv_buffer_counts,
    )

_HOME = {
    "Lifetime": "lifetimes",
    "PoolStats": "pool",
    "RecvBufferCounts": "pool",
    "RecvBufferPool": "pool",
    "Slots": "lifetimes",
    "assign_slots": "lifetimes",
    "install_recv_buffer_pool": "pool",
    "max_overlap": "lifetimes",
    "recv_buffer_counts": "pool",
    "recv_lifetimes": "lifetimes",
}

__all__ = [
    "Lifetime",
    "PoolStats",
    "RecvBufferCounts",
    "RecvBufferPool",
    "Slots",
    "assign_slots",
    "install_recv_buffer_pool",
    "max_overlap",
    "recv_buffer_counts",
    "recv_lifetimes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
