"""What stands in a stage where a module of another stage was: no parameters, no storage."""

from typing import Any

import torch
from torch import nn

_MODULE_STATE = frozenset(nn.Module().__dict__)


class StandIn(nn.Module):
    """Base: plain attributes of the module it replaces stay readable.

    Models read such attributes from outside (a layer's `attention_type`, a projection's
    `weight.dtype`); what they read is kept, as values without storage.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if name not in _MODULE_STATE and isinstance(value, bool | int | float | str):
                setattr(self, name, value)
        weight = getattr(replaced, "weight", None)
        if isinstance(weight, torch.Tensor):
            # Not registered: a stand-in adds nothing to the stage's state dict.
            object.__setattr__(self, "weight", torch.empty(0, dtype=weight.dtype, device="meta"))


class PassThroughLayer(StandIn):
    """A decoder layer of another stage: hands the hidden states on."""

    def __init__(self, replaced: nn.Module, hidden_keyword: str | None, in_tuple: bool) -> None:
        super().__init__(replaced)
        self.hidden_keyword = hidden_keyword
        self.in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states the way the layer returned them."""
        hidden = args[0] if args else kwargs[self.hidden_keyword or "hidden_states"]
        return (hidden,) if self.in_tuple else hidden


class ZeroStandIn(StandIn):
    """A module that runs before the layers: yields zeros of the shape and dtype it would yield."""

    def __init__(self, replaced: nn.Module, out_dim: int, dtype: torch.dtype) -> None:
        super().__init__(replaced)
        self.out_dim = out_dim
        self.dtype = dtype

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros: ids `[...]` give `[..., out_dim]`, and so do states `[..., in_dim]`."""
        shape = x.shape[:-1] if x.is_floating_point() else x.shape
        return torch.zeros((*shape, self.out_dim), dtype=self.dtype, device=x.device)


class IdentityStandIn(StandIn):
    """A module that runs after the layers, or never: returns its first argument."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return `x`."""
        return x
