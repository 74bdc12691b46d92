"""The names of torch's that carry an underscore; read against torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def default_timeout(device_type: str) -> timedelta | None:
    """Returns the timeout of the default process group, None where its backend keeps none."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def new_mesh(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    """Builds a mesh whose groups all have the timeout; None is torch's own choice.

    The timeout is given when a group is made: set later, gloo's collectives follow it but its
    receives, which a pipeline consists of, keep the old one.
    """
    overrides = tuple((None, _options(timeout)) for _ in names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=overrides)


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str, timeout: timedelta | None) -> None:
    """Makes `mesh[name]` the one-dimensional mesh over the axes; mesh is not a slice."""
    options = _options(timeout)
    if mesh.get_coordinate() is not None:
        mesh[axes]._flatten(name, backend_override=options)
        return
    # Torch cannot slice on a rank outside the mesh, yet every rank must make every group, and
    # make it the way the members do.
    inside: Any = mesh
    names = mesh.mesh_dim_names or ()
    layout = type(inside._layout)([inside._layout[names.index(axis)] for axis in axes])
    whole = type(layout)([layout.collapse()])
    inside._init_process_groups(whole, inside._rank_map, (name,), ((None, options),))


def axis_size(mesh: DeviceMesh, name: str) -> int | None:
    """Returns the size of an axis, flattened ones too; None where the mesh does not have it."""
    names = mesh.mesh_dim_names or ()
    if name in names:
        return mesh.size(names.index(name))
    flattened = _flattened(mesh).get(name)
    return None if flattened is None else flattened.size()


def whole_axis(mesh: DeviceMesh) -> str | None:
    """Returns the name of an axis or flattened axis that has all ranks of the mesh, if any."""
    names = (*(mesh.mesh_dim_names or ()), *_flattened(mesh))
    return next((name for name in names if axis_size(mesh, name) == mesh.size()), None)


def _flattened(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    # Torch warns when a flattened axis is taken by its name.
    mapping: dict[str, DeviceMesh] = mesh._flatten_mapping
    return mapping


def _options(timeout: timedelta | None) -> Any:
    # A new object for each axis: torch writes the group's name and ranks into it.
    if timeout is None or dist.get_backend() == "fake":
        return None
    if "nccl" in dist.get_backend_config():  # on CPU meshes too: NCCL takes no other options
        nccl: Any = dist
        options = nccl.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return options
    backend: Any = torch._C._distributed_c10d.Backend
    return backend.Options(dist.get_backend(), timeout)
