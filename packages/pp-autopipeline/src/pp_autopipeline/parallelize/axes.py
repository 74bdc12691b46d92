"""Axes of a mesh as the parts of parallelism need them."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pp_autopipeline.torch_private import flattened, root_mesh

_LONELY = "_pp_lonely"


def axis_of(mesh: DeviceMesh | None, name: str | None) -> DeviceMesh | None:
    """Return an axis that has more than one rank, else None."""
    if mesh is None or name is None:
        return None
    axis = mesh[name]
    return axis if axis.size() > 1 else None


def data_mesh(
    mesh: DeviceMesh, dp_axis_names: tuple[str, ...], cp_axis_name: str | None
) -> DeviceMesh | None:
    """Return the ranks over which weights are sharded and gradients averaged; None if it is one.

    Context-parallel ranks have the same weights too, so they are among them. With two axes the first is of
    copies. Axes that a mesh does not have yet in one piece are joined, for which all ranks must
    call this alike.
    """
    names = mesh.mesh_dim_names or ()
    known = [name for name in dp_axis_names if name in names or _has(mesh, name)]
    *copies, shard = known or [""]
    joined = [name for name in (shard, cp_axis_name) if name]
    if not joined:
        return None
    inner = _slice(mesh, joined[0]) if len(joined) == 1 else flattened(mesh, tuple(joined))
    if copies and mesh[copies[0]].size() > 1:
        if len(joined) == 1:
            return mesh[(copies[0], joined[0])]
        name = (inner.mesh_dim_names or ("",))[0]
        return root_mesh(mesh)[(copies[0], name)]
    return inner if inner.size() > 1 else None


def data_groups(mesh: DeviceMesh, dp_axis_names: tuple[str, ...]) -> list[dist.ProcessGroup]:
    """Return the groups of this rank along each axis whose ranks get other batches."""
    return [_slice(mesh, name).get_group() for name in dp_axis_names if _has(mesh, name)]


def lonely_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone. Every rank must call this alike."""
    if "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() == 1:
        return mesh["tp"]
    known: DeviceMesh | None = vars(mesh).get(_LONELY)
    if known is None:
        ranks = torch.arange(dist.get_world_size()).unsqueeze(1)
        known = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("all", "self"))["self"]
        vars(mesh)[_LONELY] = known  # not by equality: an equal mesh may be of groups that are gone
    return known


def _slice(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return an axis, a flattened one too: torch warns that taking those by name may go away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return mesh[name]


def _has(mesh: DeviceMesh, name: str) -> bool:
    try:
        _slice(mesh, name)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True
