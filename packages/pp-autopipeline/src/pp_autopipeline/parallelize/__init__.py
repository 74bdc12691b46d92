"""Callbacks for `AutoPipeline.build`: what is done to a stage besides being one.

Names are imported on first use: Transformers' own parallel code comes with some of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_autopipeline.parallelize.apply import Parallelize, parallelize_fn
    from pp_autopipeline.parallelize.config import (
        DDPConfig,
        FSDP2Config,
        MegatronFSDPConfig,
        MoEParallelizerConfig,
        MultimodalDistributedConfig,
        MultimodalVisionConfig,
    )
    from pp_autopipeline.parallelize.setup import DistributedSetup

_HOME = {
    "DDPConfig": "config",
    "DistributedSetup": "setup",
    "FSDP2Config": "config",
    "MegatronFSDPConfig": "config",
    "MoEParallelizerConfig": "config",
    "MultimodalDistributedConfig": "config",
    "MultimodalVisionConfig": "config",
    "Parallelize": "apply",
    "parallelize_fn": "apply",
}

__all__ = [
    "DDPConfig",
    "DistributedSetup",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "MoEParallelizerConfig",
    "MultimodalDistributedConfig",
    "MultimodalVisionConfig",
    "Parallelize",
    "parallelize_fn",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
