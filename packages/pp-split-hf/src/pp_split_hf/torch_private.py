"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors have shapes and dtypes and no values."""
    # The shape environment lets a shape depend on values, as `nonzero` makes it.
    return FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)
    )


def replace_tensors(module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer, sharded ones too, as `to` and `to_empty` do."""
    module._apply(replace)


def replace_parameters(module: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace parameters by others, and leave those alone that someone else may hold."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = replace(parameter)


def replace_buffers(module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace buffers by others."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = replace(buffer)


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module itself holds: parameters, buffers and plain attributes."""
    for holder in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in holder.values() if isinstance(value, torch.Tensor))


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Put a parameter in the place of another of that name, without a registration hook."""
    module._parameters[name] = parameter


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with what is registered now and not later."""
    registries = ("_parameters", "_buffers", "_modules")
    return {k: dict(v) if k in registries else v for k, v in vars(module).items()}


def next_sequence_number() -> int:
    """Return the number that the next node of the autograd graph gets in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    """Return the number of a node of the autograd graph; it grows with each node made."""
    return int(node._sequence_nr())


def autograd_edge(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return the node of the autograd graph that made a tensor, and which of its outputs it is."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def local_region(tensor: DTensor) -> tuple[slice, ...]:
    """Return which part of a sharded tensor this rank has."""
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
