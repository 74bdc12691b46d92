"""A model's own forward on fake tensors: shapes and dtypes, and nothing computed."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from pp_split_hf.dtypes import cast_dtypes
from pp_split_hf.fakes import EveryElementCounts, as_if_for_tracing
from pp_split_hf.torch_private import fake_tensors, module_state
from pp_split_hf.transformers_private import shapes_of_training


class FakeModel:
    """A model whose weights are fake, for as long as `on_fake_tensors` is open."""

    def __init__(
        self, model: nn.Module, tensors: dict[str, torch.Tensor], selecting: EveryElementCounts
    ) -> None:
        self._model = model
        self._selecting = selecting
        self.tensors = tensors
        """What stands for each parameter and buffer, by name; a tied one has its first name."""

    @property
    def num_selections(self) -> int:
        """How often so far a size depended on values, and the largest there can be was taken."""
        return self._selecting.num_selections

    def run(self, batch_size: int, seq_len: int) -> Any:
        """Run the forward on token ids, and return what it returns."""
        ids = torch.zeros((batch_size, seq_len), dtype=torch.long)
        kwargs = {"use_cache": False} if accepts(self._model.forward, "use_cache") else {}
        return functional_call(self._model, self.tensors, (), {"input_ids": ids, **kwargs})


@contextmanager
def on_fake_tensors(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    as_trained: bool = False,
) -> Iterator[FakeModel]:
    """Give a model fake weights inside the context; it is not changed, and nothing is computed.

    Args:
        model: A Hugging Face model, on any device, meta included.
        dtype: What floating point parameters are taken to be; None means what they are.
        as_trained: Run what training runs, of its shapes: gradients for the parameters that are
            trained, masks as for rows of one text each, experts that get their tokens in groups.
            Otherwise everything takes a gradient, by which what depends on weights tells itself.

    Raises:
        RuntimeError: If what is run inside does not work on fake tensors.
    """
    before = [(module, module_state(module)) for module in model.modules()]
    dtypes = {name: cast for name, _, cast in cast_dtypes(model, dtype)}
    selecting = EveryElementCounts()
    try:
        shapes = shapes_of_training() if as_trained else nullcontext()
        experts = "grouped_mm" if as_trained else "batched_mm"
        tracing = as_if_for_tracing(model, experts)
        with torch.enable_grad(), shapes, tracing, fake_tensors(), selecting:
            tensors = {
                name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                for name, buffer in model.named_buffers()
            }
            for name, p in model.named_parameters():
                trained = p.is_floating_point() and (p.requires_grad or not as_trained)
                tensors[name] = torch.empty(p.shape, dtype=dtypes[name], requires_grad=trained)
            yield FakeModel(model, tensors, selecting)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]  # torch adds pages of advice
        raise RuntimeError(
            f"cannot follow the forward of {type(model).__name__} on fake tensors: "
            f"{type(error).__name__}: {said}"
        ) from error
    finally:
        # A model may keep tensors of its last forward, or other modules (BigBird's attention).
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def accepts(forward: Callable[..., Any], keyword: str) -> bool:
    """Return whether a forward takes a keyword argument of that name."""
    parameters = inspect.signature(forward).parameters
    return keyword in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
