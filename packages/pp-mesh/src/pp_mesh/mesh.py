"""From sizes to device meshes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pp_mesh import torch_private
from pp_mesh.sizes import ParallelSizes

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


class Meshes(NamedTuple):
    """The meshes of a job."""

    world_mesh: DeviceMesh
    """Axes `pp, dp_replicate, dp_shard, cp, tp`; also `dp`, `dp_shard_cp` and `dp_cp`."""

    moe_mesh: DeviceMesh | None
    """Axes `pp, ep_shard, ep`; None without expert parallelism."""


def build_mesh(
    sizes: ParallelSizes,
    device_type: str | None = None,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
) -> Meshes:
    """Lays the ranks out along the axes and makes a process group for each.

    The last axis varies fastest, so that neighbouring ranks share a tensor-parallel group and
    pipeline stages lie furthest apart. Every rank of the job calls it, with the same arguments;
    a rank that is not in `ranks` gets meshes it has no coordinate in.

    Args:
        sizes: Size of every axis; resolved here against the number of ranks.
        device_type: "cuda" or "cpu"; None: what the default process group's backend serves.
        timeout_minutes: Of every group made here; None: that of the default process group.
        ranks: Global ranks, ascending, that the mesh covers; None: all.

    Returns:
        The world mesh, and the mesh of the experts if `ep_size` is more than 1.

    Raises:
        RuntimeError: The process group is not initialised.
        ValueError: The sizes do not fit the ranks, or an argument makes no sense.
        TypeError: A size is not an integer.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group: call initialize_distributed() before build_mesh()")
    _check_arguments(timeout_minutes, ranks)
    chosen = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    sizes = sizes.resolve(len(chosen))
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    timeout = (
        torch_private.default_timeout(device_type)
        if timeout_minutes is None
        else timedelta(minutes=timeout_minutes)
    )
    grid = torch.tensor(chosen, dtype=torch.int, device="cpu")
    world_mesh = _world_mesh(sizes, device_type, grid, timeout)
    moe_mesh = None if sizes.ep_size == 1 else _moe_mesh(sizes, device_type, grid, timeout)
    return Meshes(world_mesh, moe_mesh)


def _world_mesh(
    sizes: ParallelSizes, device_type: str, grid: torch.Tensor, timeout: timedelta | None
) -> DeviceMesh:
    shape = (
        sizes.pp_size,
        sizes.dp_replicate_size,
        sizes.dp_shard_size,
        sizes.cp_size,
        sizes.tp_size,
    )
    mesh = torch_private.new_mesh(device_type, grid.view(shape), _AXES, timeout)
    for name, axes in _FLATTENED.items():
        torch_private.flatten(mesh, axes, name, timeout)
    return mesh


def _moe_mesh(
    sizes: ParallelSizes, device_type: str, grid: torch.Tensor, timeout: timedelta | None
) -> DeviceMesh:
    # Where experts stay off the TP axis, each TP index has a mesh of its own: a fourth axis
    # holds them apart and is sliced away.
    tp_size = 1 if sizes.experts_span_tp else sizes.tp_size
    shape = (sizes.pp_size, -1, sizes.ep_size, tp_size)
    names = ("pp", "ep_shard", "ep", "tp")
    mesh = torch_private.new_mesh(device_type, grid.view(shape), names, timeout)
    # Torch cannot slice on a rank outside the mesh.
    return mesh if mesh.get_coordinate() is None else mesh["pp", "ep_shard", "ep"]


def _check_arguments(timeout_minutes: float | None, ranks: Sequence[int] | None) -> None:
    problems = []
    if timeout_minutes is not None and not timeout_minutes > 0:
        problems.append(f"timeout_minutes={timeout_minutes} must be more than 0")
    world_size = dist.get_world_size()
    if ranks is not None:
        if not ranks or list(ranks) != sorted(set(ranks)):
            problems.append(f"ranks={list(ranks)} must be ascending, each once, at least one")
        outside = [rank for rank in ranks if not 0 <= rank < world_size]
        if outside:
            problems.append(f"ranks {outside} do not exist: the world size is {world_size}")
    if problems:
        raise ValueError("build_mesh: " + "; ".join(problems))
