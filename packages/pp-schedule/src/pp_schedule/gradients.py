"""Gradients of a model that lies on several ranks: scaling, and one norm for all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from pp_schedule.tensor_lists import divide, multiply, norms

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage

_SHARD_MESH = "pp_shard_mesh"
Axis = tuple["DeviceMesh", int]
"""A mesh and one of its dims: a line of ranks, each of which has other values of a gradient."""


def mark_shards(module: nn.Module, mesh: "DeviceMesh") -> None:
    """Say that the parameters of a module are shards: every rank of the mesh has others.

    For `clip_grad_norm`, and needed by plain tensors alone, such as experts that a `parallelize_fn`
    has dealt out by hand: a DTensor says by itself over which ranks it lies. What FSDP makes of the
    module later, over other ranks, counts besides.

    Args:
        module: A module all of whose parameters, also those of its children, are shards.
        mesh: All ranks that have one; for experts `moe_mesh["ep"]`.
    """
    setattr(module, _SHARD_MESH, mesh)


@torch.no_grad()
def scale_grads_by_divisor(stages: Iterable["PipelineStage"], divisor: float) -> None:
    """Divide the gradients of all parameters of the given stages in place.

    Every pipeline rank calls it after its step, with the same divisor: the number of label tokens
    of the global batch for a loss that is a sum, for instance. Nothing is sent.

    Raises:
        ValueError: If the divisor is not a positive finite number.
    """
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor={divisor} must be a positive finite number")
    parameters = _parameters(stage.submod for stage in stages)
    if divisor != 1:
        divide(_local_gradients(parameters), float(divisor))


@torch.no_grad()
def clip_grad_norm(
    max_norm: float | None,
    model_parts: Sequence[nn.Module],
    norm_type: float = 2.0,
    pp_enabled: bool = True,
    device_mesh: "DeviceMesh | None" = None,
    pp_axis_name: str | None = "pp",
    foreach: bool | None = None,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of all stages by their one global norm.

    Every rank of the job calls it after its step. DTensors may lie on several meshes, as those of
    experts and of all else do: each is counted over the ranks that have shards of it, whatever
    gradients those ranks have, and what is replicated counts once. Gradients that are partial sums
    are summed first, in place of `grad`. One number is sent per kind of placement, and one over the
    pipeline axis.

    A plain tensor is taken to be equal on all ranks of its stage, unless `mark_shards` says
    otherwise. A parameter with the attribute `pp_replica` set is a copy of one that another rank
    counts, as of a tied embedding: it is clipped and does not count.

    Args:
        max_norm: The largest norm to allow; None only measures.
        model_parts: This rank's parts. A parameter that two of them share counts once.
        norm_type: The p of the p-norm; `inf` for the largest absolute value.
        pp_enabled: False leaves the pipeline axis out, for a model that is whole on this rank.
        device_mesh: The mesh that has the pipeline axis. None means that the default process group
            is the pipeline: with other parallelism beside it, the mesh must be given.
        pp_axis_name: Name of the pipeline axis of the mesh.
        foreach: Use torch's fused kernels; None lets this function choose.
        error_if_nonfinite: Raise if the norm is NaN or infinite; on every rank, since all have
            the same norm.

    Returns:
        The norm before clipping, a 0-dim float64 tensor, equal on every rank.

    Raises:
        ValueError: If `max_norm` or `norm_type` is not positive, or the mesh is missing or lacks
            the axis.
        RuntimeError: For a norm that is not finite, if asked.
    """
    norm_type = float(norm_type)
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive, or None to only measure")
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive")
    parameters = _parameters(model_parts)
    _sum_partial_gradients(parameters)
    axes = {p: _axes(p, mesh) for p, mesh in parameters.items()}
    group = _pipeline_group(device_mesh, pp_axis_name, axes) if pp_enabled else None
    device = _device(parameters, device_mesh)
    norm = _norm_of_stages(axes, norm_type, foreach, device)
    if group is not None:
        norm = _norm_over(group, norm, norm_type, device_mesh)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradient norm over all stages is {norm.item()}; some loss or gradient is not "
            "finite, so this step must not be taken"
        )
    if max_norm is not None:
        # As torch's `clip_grads_with_norm_`, which takes no DTensors of several meshes.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        multiply(_local_gradients(parameters), factor, foreach)
    return norm


def _parameters(parts: Iterable[nn.Module]) -> "dict[nn.Parameter, DeviceMesh | None]":
    """Each parameter of the parts once, and the mesh of which its module was marked a shard."""
    found: dict[nn.Parameter, DeviceMesh | None] = {}
    for part in parts:
        found |= dict.fromkeys(part.parameters())
        for module in part.modules():
            if (mesh := vars(module).get(_SHARD_MESH)) is not None:
                found |= dict.fromkeys(module.parameters(), mesh)
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [_local(p.grad) for p in parameters if p.grad is not None]


def _sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements):
            whole = [Replicate()] * len(p.grad.placements)
            p.grad = p.grad.redistribute(placements=getattr(p, "placements", whole))


def _axes(parameter: nn.Parameter, mark: "DeviceMesh | None") -> tuple[Axis, ...]:
    """Over which ranks a gradient lies in shards.

    Where there is none, the parameter tells: its other shards may have a gradient, and then all
    of them must take part in the sum.
    """
    axes: list[Axis] = []
    tensor = parameter if parameter.grad is None else parameter.grad
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        axes += [(mesh, dim) for dim, x in enumerate(tensor.placements) if not x.is_replicate()]
    if mark is not None:
        axes += [(mark, dim) for dim in range(mark.ndim)]
    return tuple((mesh, dim) for mesh, dim in axes if mesh.size(dim) > 1)


def _pipeline_group(
    mesh: "DeviceMesh | None",
    pp_axis_name: str | None,
    axes: Mapping[nn.Parameter, tuple[Axis, ...]],
) -> dist.ProcessGroup | None:
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if pp_axis_name not in names:
            raise ValueError(f"device_mesh has no axis {pp_axis_name!r}; its axes are {names}")
        return mesh.get_group(pp_axis_name)
    if not dist.is_initialized():
        return None
    for shard_mesh, dim in (axis for many in axes.values() for axis in many):
        name = (shard_mesh.mesh_dim_names or {dim: str(dim)})[dim]
        raise ValueError(
            "device_mesh=None means that all ranks are one pipeline, but parameters are sharded "
            f"over {shard_mesh.size(dim)} of them (axis {name!r}): give the mesh that has the "
            "pipeline axis as device_mesh, or pp_enabled=False if there is none"
        )
    return dist.group.WORLD


def _device(parameters: Iterable[nn.Parameter], mesh: "DeviceMesh | None") -> torch.device:
    for parameter in parameters:
        return parameter.device
    # A stage may own nothing.
    return torch.device(mesh.device_type if mesh is not None else "cpu")


def _norm_of_stages(
    axes: Mapping[nn.Parameter, tuple[Axis, ...]],
    norm_type: float,
    foreach: bool | None,
    device: torch.device,
) -> torch.Tensor:
    """The norm of this rank's stages, over all ranks that have shards of them."""
    kinds: dict[tuple[Axis, ...], list[torch.Tensor]] = {}
    for parameter, many in axes.items():
        if parameter.grad is not None or parameter.requires_grad:
            gradients = kinds.setdefault(many, [])
            if parameter.grad is not None and not hasattr(parameter, "pp_replica"):
                gradients.append(_local(parameter.grad))
    # float64 on every rank: dtypes may differ between ranks, and one may have no gradients at all.
    found = [torch.zeros((), device=device, dtype=torch.float64)]
    # Ranks that share an axis hold shards of the same parameters, in the same order.
    for many, gradients in kinds.items():
        norm = _combined(norms(gradients, norm_type, foreach), norm_type, device)
        for mesh, dim in many:
            norm = _norm_over(mesh.get_group(dim), norm, norm_type, mesh)
        found.append(norm)
    return _combined(found, norm_type, device)


def _combined(
    norms: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The norm of vectors of norms."""
    if not norms:
        return torch.zeros((), device=device, dtype=torch.float64)
    flat = torch.cat([norm.to(device, torch.float64).flatten() for norm in norms])
    norm: torch.Tensor = torch.linalg.vector_norm(flat, norm_type)
    return norm


def _norm_over(
    group: dist.ProcessGroup, norm: torch.Tensor, norm_type: float, mesh: "DeviceMesh | None"
) -> torch.Tensor:
    """The norm over the ranks of a group, of which each brings its own."""
    # Gradients may be kept on the CPU beside ranks that send from accelerators alone.
    sends_from = "cuda" if "nccl" in dist.get_backend(group) else norm.device.type
    device_type = mesh.device_type if mesh is not None else sends_from
    if math.isinf(norm_type):
        # A maximum forgets NaNs on some transports; a flag is not forgotten.
        pair = torch.stack([norm.nan_to_num(0.0, math.inf), norm.isnan().double()]).to(device_type)
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
        return torch.where(pair[1] > 0, math.nan, pair[0]).to(norm.device)
    power = norm.pow(norm_type).to(device_type)
    dist.all_reduce(power, op=dist.ReduceOp.SUM, group=group)
    return power.pow(1.0 / norm_type).to(norm.device)
