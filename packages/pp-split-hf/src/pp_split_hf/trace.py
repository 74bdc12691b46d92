"""One forward on fake tensors: what a model runs, in which order, and what enters its layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from pp_split_hf.torch_private import fake_tensors

# Primes that no model has as a size, so that a traced dim tells what it depends on. Fake tensors
# have no memory: a large batch costs nothing.
_BATCH, _SEQ = 1009, 13


@dataclass(frozen=True)
class BoundaryShape:
    """The shape of a traced tensor, for any batch size and sequence length."""

    dims: tuple[tuple[int, bool, bool], ...]
    """Per dim: a constant factor, whether the batch size and whether the length multiply it."""
    dtype: torch.dtype
    """The dtype the model computes there."""

    def sizes(self, batch_size: int, seq_len: int) -> list[int]:
        """Return the sizes of the dims."""
        return [
            factor * (batch_size if batch else 1) * (seq_len if seq else 1)
            for factor, batch, seq in self.dims
        ]

    def tensor(self, batch_size: int, seq_len: int) -> torch.Tensor:
        """Return a meta tensor of that shape, as what crosses the boundary in training."""
        return torch.empty(
            self.sizes(batch_size, seq_len),
            dtype=self.dtype,
            device="meta",
            requires_grad=self.dtype.is_floating_point,
        )

    def batch_and_seq(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the batch size and sequence length that give hidden states of `shape`."""
        sizes = {"batch": 1, "seq": 1}
        for (factor, batch, seq), size in zip(self.dims, shape, strict=True):
            if batch != seq:
                sizes["batch" if batch else "seq"] = size // factor
        return sizes["batch"], sizes["seq"]


@dataclass(frozen=True)
class ForwardTrace:
    """What one forward did."""

    order: tuple[str, ...]
    """FQNs in the order in which they were called, repeats included."""
    outputs: dict[str, Any] = field(repr=False)
    """Per FQN what it returned, with a `BoundaryShape` for every tensor."""
    boundaries: dict[str, BoundaryShape] = field(repr=False)
    """Per layer FQN what enters it."""
    exit: BoundaryShape | None
    """What leaves the layer that ran last."""
    hidden_keyword: str | None
    """The keyword under which layers are given the hidden states; None if they come first."""
    carried: tuple[tuple[str, str], ...] = ()
    """Layer and argument of whatever else a layer takes from earlier ones or from weights."""


def trace_forward(
    model: nn.Module,
    layers: Sequence[str],
    units: Sequence[str],
    dtype: torch.dtype | None = None,
) -> ForwardTrace:
    """Run one forward on fake tensors, weights included, and record what happens.

    Nothing of the model is computed, moved or changed; meta models trace as well as real ones.

    Args:
        model: A Hugging Face model that takes `input_ids`.
        layers: FQNs of its decoder layers.
        units: FQNs of the modules to watch beside them.
        dtype: What floating point parameters are taken to be; None means what they are.

    Raises:
        RuntimeError: If the forward cannot run on fake tensors.
    """
    recorder = _Recorder(set(layers))
    handles = []
    for fqn in (*layers, *units):
        module = model.get_submodule(fqn)
        handles.append(module.register_forward_pre_hook(recorder.enter(fqn), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.leave(fqn)))
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        # With gradients: what depends on weights tells itself by requiring one.
        with torch.enable_grad(), _fake_experts(model), fake_tensors():
            tensors = {
                name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                for name, buffer in model.named_buffers()
            }
            for name, parameter in model.named_parameters():
                cast = dtype if parameter.is_floating_point() else None
                tensors[name] = torch.empty(
                    parameter.shape,
                    dtype=cast or parameter.dtype,
                    requires_grad=parameter.is_floating_point(),
                )
            ids = torch.zeros((_BATCH, _SEQ), dtype=torch.long)
            kwargs = {"use_cache": False} if accepts(model.forward, "use_cache") else {}
            functional_call(model, tensors, (), {"input_ids": ids, **kwargs})
    except Exception as error:
        raise RuntimeError(
            f"cannot follow the forward of {type(model).__name__} on fake tensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, attributes in before:  # a model may keep tensors of its last forward
            vars(module).clear()
            vars(module).update(attributes)
    return recorder.result()


def accepts(forward: Callable[..., Any], keyword: str) -> bool:
    """Return whether a forward takes a keyword argument of that name."""
    parameters = inspect.signature(forward).parameters
    return keyword in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


class _Recorder:
    def __init__(self, layers: set[str]) -> None:
        self.layers = layers
        self.order: list[str] = []
        self.outputs: dict[str, Any] = {}
        self.boundaries: dict[str, BoundaryShape] = {}
        self.exit: BoundaryShape | None = None
        self.hidden_keyword: str | None = None
        self.carried: list[tuple[str, str]] = []
        self.made_by_layers: dict[int, torch.Tensor] = {}

    def enter(self, fqn: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.order.append(fqn)
            if fqn in self.layers:
                if not args:
                    self.hidden_keyword = _first_tensor_keyword(kwargs)
                hidden = args[0] if args else kwargs[self.hidden_keyword or ""]
                self.boundaries.setdefault(fqn, _boundary(hidden))
                self.note_carried(fqn, args, kwargs, hidden)

        return hook

    def note_carried(
        self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> None:
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        for name, value in named.items():
            for tensor in tensors_in(value):
                needed = tensor.requires_grad or id(tensor) in self.made_by_layers
                if tensor is not hidden and needed:
                    self.carried.append((fqn, name))
                    break

    def leave(self, fqn: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.outputs[fqn] = map_tensors(output, _boundary)
            if fqn in self.layers:
                self.made_by_layers |= {id(t): t for t in tensors_in(output)}
                self.exit = _boundary(output[0] if isinstance(output, tuple | list) else output)

        return hook

    def result(self) -> ForwardTrace:
        return ForwardTrace(
            tuple(self.order),
            self.outputs,
            self.boundaries,
            self.exit,
            self.hidden_keyword,
            tuple(dict.fromkeys(self.carried)),
        )


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with its tensors changed, also those in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(each, change) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _first_tensor_keyword(kwargs: dict[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))


def _boundary(hidden: Any) -> BoundaryShape:
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"a layer is given a {type(hidden).__name__} where hidden states belong")
    dims = []
    for size in hidden.shape:
        batch, seq = size > 0 and size % _BATCH == 0, size > 0 and size % _SEQ == 0
        # A constant multiple of 13, such as a hidden size of 52, is no sequence length: lengths
        # are told apart from it by standing alone or beside the batch size.
        seq = seq and (size == _SEQ or batch)
        dims.append((size // (_BATCH if batch else 1) // (_SEQ if seq else 1), batch, seq))
    return BoundaryShape(tuple(dims), hidden.dtype)


@contextmanager
def _fake_experts(model: nn.Module) -> Iterator[None]:
    """Have mixture-of-experts layers use the formula that does not depend on the data."""
    config = getattr(model, "config", None)
    name = "_experts_implementation"
    configs = [c for c in _configs(config) if getattr(c, name, None) not in (None, "batched_mm")]
    before = [getattr(c, name) for c in configs]
    for each in configs:
        setattr(each, name, "batched_mm")
    try:
        yield
    finally:
        for each, implementation in zip(configs, before, strict=True):
            setattr(each, name, implementation)


def _configs(config: Any) -> list[Any]:
    if config is None:
        return []
    nested = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return [config, *(c for c in nested if c is not None)]
