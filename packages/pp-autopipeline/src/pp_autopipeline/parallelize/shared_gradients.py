"""Weights whose gradients, as one rank computes them, are not yet what they should be."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class _SumGradient(torch.autograd.Function):
    """The identity; gradients are summed over a group."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _ScaleGradient(torch.autograd.Function):
    """The identity; gradients are multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have the gradients of a module's own parameters summed over an axis, in each backward.

    The sum is part of the backward, not a hook after it, so that what accumulated before is not
    summed again.
    """
    group = mesh.get_group()
    _use_changed(module, lambda weight: _SumGradient.apply(weight, group))


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Have the gradients of a module's own parameters multiplied by a factor, in each backward."""
    _use_changed(module, lambda weight: _ScaleGradient.apply(weight, factor))


def _use_changed(module: nn.Module, change: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Have a module's forward use changed weights; between forwards it has its own."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        _put(module, {name: change(parameter) for name, parameter in own.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            _put(module, own)

    object.__setattr__(module, "forward", run)


def _put(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        # A plain entry: `setattr` takes no tensor where a parameter was.
        vars(module)["_parameters"][name] = tensor
