"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors have shapes and dtypes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def replace_tensors(module: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer, sharded ones too, as `to` and `to_empty` do."""
    module._apply(replace)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Put a parameter in the place of another of that name, without a registration hook."""
    module._parameters[name] = parameter
