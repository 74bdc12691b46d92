"""What stands in a stage where a module of another stage was: no parameters, no storage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pp_split_hf.shapes import BoundaryShape, tensors_in

_MODULE_STATE = frozenset(nn.Module().__dict__)


@dataclass
class Sizes:
    """The batch that a stage is at; whoever runs the stage keeps it up to date."""

    batch_size: int = 0
    """Rows; 0 if nobody told."""
    seq_len: int = 0
    """Tokens per row."""
    device: torch.device | None = None
    """Where the batch is; None means the default device."""


class StandIn(nn.Module):
    """Base: plain attributes of the module it replaces stay readable.

    Models read such attributes from outside (a layer's `attention_type`, the `weight.dtype` of a
    projection inside a layer); what they read is kept, as values without storage.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in _attributes(replaced):
            if name not in _MODULE_STATE and isinstance(value, bool | int | float | str):
                setattr(self, name, value)
        weight = getattr(replaced, "weight", None)
        if isinstance(weight, torch.Tensor):
            object.__setattr__(self, "_weight_like", (weight.shape, weight.dtype))
        inner = {name: StandIn(child) for name, child in replaced.named_children()}
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_replaced_class", type(replaced))

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("_inner", {})
        if name in inner:
            return inner[name]
        if name == "weight" and "_weight_like" in vars(self):
            return self._stand_in_weight(*vars(self)["_weight_like"])
        if not name.startswith("_") and callable(
            getattr(vars(self).get("_replaced_class"), name, None)
        ):
            # Methods by which a model sets up its layers have nothing to do here; a dict of
            # modules tells its keys.
            return getattr(inner, name) if name == "keys" else _do_nothing
        return super().__getattr__(name)

    def _stand_in_weight(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        # Not registered: a stand-in adds nothing to the stage's state dict.
        return torch.empty(0, dtype=dtype, device="meta")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """What a stand-in's methods do."""


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes, and before them those that its classes give it."""
    for cls in reversed(type(module).__mro__):
        if issubclass(cls, nn.Module) and cls is not nn.Module:
            yield from ((n, v) for n, v in vars(cls).items() if not n.startswith("__"))
    yield from vars(module).items()


class PassThroughLayer(StandIn):
    """A decoder layer of another stage: hands the hidden states on.

    Args:
        replaced: The layer.
        hidden_keyword: The keyword of the hidden states; None if they are the first argument.
        returned: What the layer returned in the trace. Of a tuple or list the first entry is the
            hidden states; the others are None here, since no layer of this stage made them.
    """

    def __init__(
        self, replaced: nn.Module, hidden_keyword: str | None, returned: Any = None
    ) -> None:
        super().__init__(replaced)
        self.hidden_keyword = hidden_keyword
        self.kind = type(returned) if isinstance(returned, tuple | list) else None
        self.num_others = len(returned) - 1 if self.kind is not None else 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states the way the layer returned them."""
        hidden = args[0] if args else kwargs[self.hidden_keyword or "hidden_states"]
        return hidden if self.kind is None else self.kind([hidden] + [None] * self.num_others)


class ZeroStandIn(StandIn):
    """A module that runs before the layers: yields zeros in the place of all it would yield.

    Args:
        replaced: The module.
        returned: What it returned in the trace.
        sizes: The batch that the stage is at.
    """

    def __init__(self, replaced: nn.Module, returned: Any, sizes: Sizes) -> None:
        super().__init__(replaced)
        self.returned = returned
        self.sizes = sizes

    def _stand_in_weight(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        # Zeros without storage, for models that read a row of a table without calling it.
        return torch.zeros((), dtype=dtype, device=self.sizes.device).expand(shape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros for the batch at hand; what the arguments say matters only without one."""
        sizes = self.sizes
        if not sizes.batch_size:
            given = next(tensors_in([args, kwargs]))
            sizes = Sizes(given.shape[0], given.shape[1], given.device)
        return self._zeros(self.returned, sizes)

    def _zeros(self, value: Any, sizes: Sizes) -> Any:
        if isinstance(value, BoundaryShape):
            shape = value.sizes(sizes.batch_size, sizes.seq_len)
            return torch.zeros(shape, dtype=value.dtype, device=sizes.device)
        if isinstance(value, dict):
            return {key: self._zeros(each, sizes) for key, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)([self._zeros(each, sizes) for each in value])
        return value


class IdentityStandIn(StandIn):
    """A module that runs after the layers, or never: returns its first argument.

    A narrow head, such as one with two outputs per token, is taken apart by name behind it, so the
    argument is cut to its width. It is never widened: logits would cost what they cost.

    Args:
        replaced: The module.
        returned: What it returned in the trace.
    """

    def __init__(self, replaced: nn.Module, returned: Any = None) -> None:
        super().__init__(replaced)
        last = returned.dims[-1:] if isinstance(returned, BoundaryShape) else ()
        self.width = next((d.offset for d in last if not d.slope and not d.batch), None)

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return `x`, or the first of its channels."""
        if self.width is None or not isinstance(x, torch.Tensor) or not x.ndim:
            return x
        return x if x.shape[-1] <= self.width else x[..., : self.width]
