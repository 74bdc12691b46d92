"""Whether all ranks of a pipeline were given the same batch."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

_PLAIN = (bool, int, float, str, type(None))


def batch_differences(batch: Mapping[str, Any], group: dist.ProcessGroup) -> list[str]:
    """Return what differs between the ranks of a group, the same list on all of them.

    Every rank calls it. Tensors are compared by shape, dtype and every byte, of which a digest is
    sent; they may be on different devices.

    Args:
        batch: What this rank was given, by the names in which the caller knows it.
        group: The pipeline's ranks.
    """
    mine = {name: _describe(value) for name, value in batch.items()}
    everyone: list[dict[str, tuple[str, str]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    names = {name: None for each in everyone for name in each}  # ordered, unlike a set
    problems = []
    for name in names:
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, each in enumerate(everyone):
            ranks.setdefault(each.get(name, ("not given", "")), []).append(rank)
        if len(ranks) > 1:
            problems.append(_difference(name, ranks))
    return problems


def _difference(name: str, ranks: Mapping[tuple[str, str], list[int]]) -> str:
    """Say on which ranks a value is what."""
    parts: list[str] = []
    seen: set[str] = set()
    for (look, _), holders in ranks.items():
        other = " with other values" if look in seen else ""
        plural = "s" if len(holders) > 1 else ""
        parts.append(f"{look}{other} on pipeline rank{plural} {', '.join(map(str, holders))}")
        seen.add(look)
    return f"{name} is {'; '.join(parts)}"


def _describe(value: Any) -> tuple[str, str]:
    """Return how a value looks in a message, and a digest of what it is."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{list(value.shape)} {value.dtype}", hashlib.sha256(data).hexdigest()
    if isinstance(value, list | tuple):
        parts = repr([_describe(part) for part in value])
        return f"a {type(value).__name__} of {len(value)}", hashlib.sha256(
            parts.encode()
        ).hexdigest()
    return (repr(value) if isinstance(value, _PLAIN) else type(value).__name__), ""
