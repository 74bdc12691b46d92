"""Gradients of a model that lies on several ranks: scaling, and one norm for all."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage


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
    gradients = [
        p.grad for p in _parameters(stage.submod for stage in stages) if p.grad is not None
    ]
    for gradient in gradients if divisor != 1 else []:
        gradient.div_(divisor)


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

    Every rank of the pipeline calls it after its step; one all-reduce of one number over the
    pipeline axis. A parameter with the attribute `pp_replica` set is a copy of one that another
    rank counts: it is clipped and does not count.

    Args:
        max_norm: The largest norm to allow; None only measures.
        model_parts: This rank's parts. A parameter that two of them share counts once.
        norm_type: The p of the p-norm; `inf` for the largest absolute value.
        pp_enabled: False leaves the all-reduce out, for a model that is whole on this rank.
        device_mesh: The mesh that has the pipeline axis. None means that the default process group
            is the pipeline: with data parallelism beside it, the mesh must be given.
        pp_axis_name: Name of the pipeline axis of the mesh.
        foreach: Use torch's fused norm kernels; None lets torch choose.
        error_if_nonfinite: Raise if the norm is NaN or infinite; on every rank, since all have
            the same norm.

    Returns:
        The norm before clipping, a 0-dim float64 tensor, equal on every rank.

    Raises:
        ValueError: If `max_norm` or `norm_type` is not positive or the mesh lacks the axis.
        RuntimeError: For a norm that is not finite, if asked.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be positive, or None to only measure")
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive")
    group = None
    if pp_enabled and device_mesh is not None:
        names = device_mesh.mesh_dim_names or ()
        if pp_axis_name not in names:
            raise ValueError(f"device_mesh has no axis {pp_axis_name!r}; its axes are {names}")
        group = device_mesh.get_group(pp_axis_name)

    parameters = [p for p in _parameters(model_parts) if p.grad is not None]
    device = _device(model_parts, device_mesh)
    counted = [p.grad for p in parameters if p.grad is not None and not hasattr(p, "pp_replica")]
    norm = _local_norm(counted, norm_type, foreach, device)
    if pp_enabled and dist.is_initialized():
        norm = _norm_over_ranks(norm, norm_type, group)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradient norm over all stages is {norm.item()}; some loss or gradient is not "
            "finite, so this step must not be taken"
        )
    if max_norm is not None and parameters:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _parameters(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Each parameter of the parts once."""
    return list({id(p): p for part in parts for p in part.parameters()}.values())


def _device(parts: Sequence[nn.Module], mesh: "DeviceMesh | None") -> torch.device:
    for part in parts:
        for parameter in part.parameters():
            return parameter.device
    # A stage may own nothing; its group still sends over the others' kind of device.
    if mesh is not None:
        return torch.device(mesh.device_type)
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda" if nccl else "cpu")


def _local_norm(
    gradients: list[torch.Tensor], norm_type: float, foreach: bool | None, device: torch.device
) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device, dtype=torch.float64)
    norm = nn.utils.get_total_norm(gradients, norm_type, False, foreach)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # float64 on every rank: dtypes may differ between ranks, and one may have no gradients at all.
    return norm.double()


def _norm_over_ranks(
    norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.pow(norm_type)
    dist.all_reduce(power, op=dist.ReduceOp.SUM, group=group)
    return power.pow(1.0 / norm_type)
