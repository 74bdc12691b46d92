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
    overrides = tuple((None, _options(device_type, timeout)) for _ in names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=overrides)


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str, timeout: timedelta | None) -> None:
    """Makes `mesh[name]` the one-dimensional mesh over the axes; mesh is not a slice."""
    if mesh.get_coordinate() is not None:
        options = _options(mesh.device_type, timeout)
        mesh[axes]._flatten(name, backend_override=options)
        return
    # Torch cannot slice on a rank outside the mesh, yet every rank must make every group.
    chosen = [mesh.mesh_dim_names.index(axis) for axis in axes] if mesh.mesh_dim_names else []
    others = [dim for dim in range(mesh.ndim) if dim not in chosen]
    rows = mesh.mesh.permute(*others, *chosen).flatten(len(others)).flatten(0, -2)
    for row in rows.tolist():
        dist.new_group(row, timeout=timeout)


def _options(device_type: str, timeout: timedelta | None) -> Any:
    # A new object for each axis: torch writes the group's name and ranks into it.
    if timeout is None or dist.get_backend() == "fake":
        return None
    if device_type == "cuda" and "nccl" in dist.get_backend():
        nccl: Any = dist
        options = nccl.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return options
    backend: Any = torch._C._distributed_c10d.Backend
    return backend.Options(dist.get_backend(), timeout)
