"""What makes a forward runnable on tensors that have no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_INDEX = "_pp_index"


class EveryElementCounts(TorchFunctionMode):
    """Selections by value take all elements, so that their sizes are known without values.

    Mixtures of experts select the tokens of each expert so. What is computed makes no sense, but
    which tensor comes from which, and in which shape, is the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_selections = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if func in (torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere):
            indices = self._all_indices(args[0])
            return indices if kwargs.get("as_tuple") else _marked(torch.stack(indices, dim=-1))
        if func is torch.where and len(args) + len(kwargs) == 1:
            return self._all_indices(args[0])
        if args and hasattr(args[0], _INDEX):
            if func is torch.Tensor.item:
                return 0
            if func in (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind):
                rows = [_marked(row) for row in args[0].unbind(*args[1:], **kwargs)]
                return iter(rows) if func is torch.Tensor.__iter__ else tuple(rows)
            if func in (torch.Tensor.__getitem__, torch.Tensor.squeeze, torch.Tensor.flatten):
                return _marked(func(*args, **kwargs))
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_mask(each) for each in index):
                spread = tuple(i for each in index for i in self._without_mask(each))
                return func(args[0], spread, **kwargs)
        return func(*args, **kwargs)

    def _without_mask(self, index: Any) -> tuple[Any, ...]:
        return self._all_indices(index) if _is_mask(index) else (index,)

    def _all_indices(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.num_selections += 1
        size = tensor.numel()
        return tuple(
            _marked(torch.zeros(size, dtype=torch.long, device=tensor.device))
            for _ in range(tensor.ndim)
        )


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a tensor holds indices of elements that were selected, all of them zero here."""
    setattr(tensor, _INDEX, True)
    return tensor


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


@contextmanager
def as_if_for_tracing(model: nn.Module, experts: str) -> Iterator[None]:
    """Have a model run what tells its dataflow: no recomputation, no data-dependent kernels.

    The caller puts module attributes back; config entries are put back here.

    Args:
        model: A Hugging Face model.
        experts: Transformers' formula for mixtures of experts: "batched_mm", or "grouped_mm",
            which copies no weights; others depend on the data.
    """
    for module in model.modules():
        if vars(module).get("gradient_checkpointing"):
            vars(module)["gradient_checkpointing"] = False
    name = "_experts_implementation"
    configs = [
        config
        for config in _configs(getattr(model, "config", None))
        if getattr(config, name, None) not in (None, experts)
    ]
    before = [getattr(config, name) for config in configs]
    for config in configs:
        setattr(config, name, experts)
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            setattr(config, name, implementation)


def _configs(config: Any) -> list[Any]:
    if config is None:
        return []
    nested = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return [config, *(each for each in nested if each is not None)]
