"""From sizes to device meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pp_mesh import torch_private
from pp_mesh.sizes import ParallelSizes
from pp_mesh.timeouts import timeout_problems


class Meshes(NamedTuple):
    """The meshes of a job, and what they say about it.

    The sizes are read from the axes, so that meshes from elsewhere serve as well, as in
    `Meshes(init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp")))`; a size whose axis
    is missing has the default that it tells.
    """

    world_mesh: DeviceMesh
    """Axes `pp, dp_replicate, dp_shard, cp, tp`; also `dp`, `dp_shard_cp` and `dp_cp`. With
    ring and Ulysses factors, `cp_ring, cp_ulysses` instead of `cp`, and `cp` flattened. On some
    of the job's ranks only, `all` too."""

    moe_mesh: DeviceMesh | None = None
    """Axes `pp, ep_shard, ep`; None without expert parallelism."""

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel degree; 1 by default."""
        return self._size("pp") or 1

    @property
    def pp_enabled(self) -> bool:
        """Whether there is more than one pipeline rank."""
        return self.pp_size > 1

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree; 1 by default."""
        return self._size("tp") or 1

    @property
    def cp_size(self) -> int:
        """Context-parallel degree; 1 by default."""
        return self._size("cp", "cp_ring", "cp_ulysses") or 1

    @property
    def cp_ring_size(self) -> int:
        """Ring-attention factor of the context-parallel axis; 1 where the axis is not split."""
        return self._size("cp_ring") or 1

    @property
    def cp_ulysses_size(self) -> int | None:
        """Ulysses factor of the context-parallel axis; None: all of it, if its consumer likes."""
        return self._size("cp_ulysses")

    @property
    def dp_size(self) -> int | None:
        """Data-parallel degree, copies times shards; None by default."""
        return self._size("dp", "dp_replicate", "dp_shard")

    @property
    def dp_replicate_size(self) -> int | None:
        """HSDP replication degree; None by default."""
        return self._size("dp_replicate")

    @property
    def dp_shard_size(self) -> int:
        """Ranks that shard one copy of the model; 1 by default."""
        return self._size("dp_shard") or 1

    @property
    def ep_size(self) -> int:
        """Expert-parallel degree; 1 without a mesh of the experts."""
        size = None if self.moe_mesh is None else torch_private.axis_size(self.moe_mesh, "ep")
        return size or 1

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of exactly the ranks in this mesh: the default one where that is all ranks.

        Raises:
            RuntimeError: This rank is not in the mesh, or the mesh has no such group.
        """
        mesh = self.world_mesh
        default_group = dist.group.WORLD
        if default_group is not None and mesh.size() == default_group.size():
            return default_group
        if mesh.get_coordinate() is None:
            raise RuntimeError(
                f"rank {dist.get_rank()} is not in this mesh of {mesh.size()} ranks: use its group "
                "on the mesh's ranks only"
            )
        axis = torch_private.whole_axis(mesh)
        if axis is None:
            raise RuntimeError(
                f"the mesh has {mesh.size()} of the job's {dist.get_world_size()} ranks and no "
                f"group of just these, only of its axes {mesh.mesh_dim_names}: make it with "
                "build_mesh(sizes, ranks=...)"
            )
        return mesh.get_group(axis)

    def _size(self, axis: str, *factors: str) -> int | None:
        """Size of an axis of the world mesh, or else the product of those of its factors."""
        size = torch_private.axis_size(self.world_mesh, axis)
        if size is None:
            found = [torch_private.axis_size(self.world_mesh, factor) for factor in factors]
            sizes = [each for each in found if each is not None]
            size = math.prod(sizes) if sizes else None
        return size


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
        ValueError: The sizes do not fit the ranks, or an argument makes no sense; the message
            tells all problems.
        TypeError: A size is not an integer.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group: call initialize_distributed() before build_mesh()")
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    chosen = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    sizes = _checked(sizes, device_type, timeout_minutes, chosen)
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
    cp = _cp_axes(sizes)
    axes = {
        "pp": sizes.pp_size,
        "dp_replicate": sizes.dp_replicate_size,
        "dp_shard": sizes.dp_shard_size,
        **cp,
        "tp": sizes.tp_size,
    }
    flattened = {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", *cp),
        "dp_cp": ("dp_replicate", "dp_shard", *cp),
    }
    if "cp" not in cp:
        flattened["cp"] = tuple(cp)
    if len(grid) < dist.get_world_size():
        flattened["all"] = tuple(axes)
    shape = tuple(axes.values())
    mesh = torch_private.new_mesh(device_type, grid.view(shape), tuple(axes), timeout)
    for name, parts in flattened.items():
        torch_private.flatten(mesh, parts, name, timeout)
    return mesh


def _cp_axes(sizes: ParallelSizes) -> dict[str, int]:
    ring, ulysses = sizes.cp_ring_size, sizes.cp_ulysses_size
    if ring is None or ulysses is None:
        return {"cp": sizes.cp_size}
    return {"cp_ring": ring, "cp_ulysses": ulysses}


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


def _checked(
    sizes: ParallelSizes, device_type: str, timeout_minutes: float | None, ranks: list[int]
) -> ParallelSizes:
    """Resolves the sizes against the ranks; tells all that is wrong with any argument."""
    problems = [] if timeout_minutes is None else timeout_problems(timeout_minutes)
    served = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    if device_type not in served:
        problems.append(
            f"device_type={device_type!r} has no backend in the process group, which serves "
            f"{', '.join(served)}: choose one of these"
        )
    problems += _rank_problems(ranks)
    kind: type[Exception] = ValueError
    try:
        sizes = sizes.resolve(max(1, len(ranks)))
    except (TypeError, ValueError) as error:
        kind = type(error)
        problems.append(str(error))
    if problems:
        raise kind("build_mesh: " + "; ".join(problems))
    return sizes


def _rank_problems(ranks: list[int]) -> list[str]:
    world_size = dist.get_world_size()
    wrong = [rank for rank in ranks if not isinstance(rank, int) or isinstance(rank, bool)]
    if wrong:
        return [f"ranks {wrong} are not integers"]
    problems = []
    if not ranks or ranks != sorted(set(ranks)):
        problems.append(f"ranks={ranks} must be ascending, each once, at least one")
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        problems.append(f"ranks {outside} do not exist: the world size is {world_size}")
    return problems
