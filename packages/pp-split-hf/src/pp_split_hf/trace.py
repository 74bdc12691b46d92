"""One forward on fake tensors: what a model runs, in which order, and what crosses where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pp_split_hf.crossing import Crossing, Cut
from pp_split_hf.fake_run import on_fake_tensors
from pp_split_hf.flow import Call, Flow, Path, leaves_of
from pp_split_hf.shapes import (
    BATCH,
    LENGTHS,
    TracedShape,
    map_shapes,
    map_tensors,
    shape_of,
    tensors_in,
)
from pp_split_hf.torch_private import next_sequence_number


@dataclass(frozen=True)
class ForwardTrace:
    """What one forward did."""

    order: tuple[str, ...]
    """FQNs in the order in which they were called, repeats included."""
    outputs: dict[str, Any] = field(repr=False)
    """Per FQN what it returned, with a `BoundaryShape` for every tensor; under "" what the model
    returned, as `main_output` has it."""
    crossings: tuple[Crossing, ...] = field(repr=False)
    """What crosses the boundary before each layer, and after the last."""
    hidden_keyword: str | None
    """The keyword under which layers are given the hidden states; None if they come first."""
    bare_parameters: dict[str, str] = field(repr=False)
    """Parameters that enter outside of any module that is watched, and where: "before" the layers,
    "between" or "after" them."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """The boundaries at which the model can be cut, 0 and the number of layers included."""
        return tuple(i for i, crossing in enumerate(self.crossings) if crossing.problem is None)


def trace_forward(
    model: nn.Module,
    layers: Sequence[str],
    units: Sequence[str],
    dtype: torch.dtype | None = None,
) -> ForwardTrace:
    """Run a forward on fake tensors, weights included, and record what happens.

    Nothing of the model is computed, moved or changed; meta models trace as well as real ones. A
    second forward, of another length, is run if the first leaves open how a shape depends on it.

    Args:
        model: A Hugging Face model that takes `input_ids`.
        layers: FQNs of its decoder layers.
        units: FQNs of the modules to watch beside them.
        dtype: What floating point parameters are taken to be; None means what they are.

    Raises:
        RuntimeError: If the forward cannot run on fake tensors.
    """
    short = _record(model, layers, units, dtype, LENGTHS[0])
    result = short.result(model)
    # A width that is the very length, as of a head with 13 labels, would be taken for it.
    is_a_width = any(LENGTHS[0] in parameter.shape for parameter in model.parameters())
    if is_a_width or _leaves_lengths_open(result):
        long = _record(model, layers, units, dtype, LENGTHS[1]).result(model)
        return _with_shapes(result, long)
    return _with_shapes(result, None)


def _record(
    model: nn.Module,
    layers: Sequence[str],
    units: Sequence[str],
    dtype: torch.dtype | None,
    length: int,
) -> "_Recorder":
    recorder = _Recorder(layers)
    handles = []
    for fqn in (*layers, *units):
        module = model.get_submodule(fqn)
        handles.append(module.register_forward_pre_hook(recorder.enter(fqn), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.leave(fqn), with_kwargs=True))
    try:
        # With gradients: what depends on weights tells itself by requiring one.
        with on_fake_tensors(model, dtype) as fake:
            recorder.parameters = {id(tensor): name for name, tensor in fake.tensors.items()}
            recorder.finish(fake.run(BATCH, length))
    finally:
        for handle in handles:
            handle.remove()
    return recorder


class _Recorder:
    """Notes every call of a watched module while a forward runs."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self.calls: list[Call] = []
        self.parameters: dict[int, str] = {}
        self.made: dict[int, int] = {}
        self.hidden_path: Path | None = None
        # Ids stay taken for as long as their tensors live.
        self._keep: list[torch.Tensor] = []

    def enter(self, fqn: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = sum(call.fqn == fqn for call in self.calls)
            call = Call(fqn, number, next_sequence_number())
            arguments: dict[str | int, Any] = dict(enumerate(args))
            arguments.update(kwargs)
            call.leaves = leaves_of(arguments)
            self._keep += [tensor for _, tensor in call.leaves]
            self.calls.append(call)
            if fqn in self.layers and self.hidden_path is None:
                self.hidden_path = ((0 if args else _first_tensor_keyword(kwargs), None),)

        return hook

    def leave(self, fqn: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            index = max(i for i, call in enumerate(self.calls) if call.fqn == fqn)
            call = self.calls[index]
            call.end, call.output = next_sequence_number(), output
            given = {id(tensor) for _, tensor in call.leaves}
            if fqn in self.layers:
                # Also what the layer put into a container that it was given.
                for tensor in tensors_in([output, args, kwargs]):
                    if not tensor.requires_grad and id(tensor) not in given:
                        self._keep.append(tensor)
                        self.made.setdefault(id(tensor), index)

        return hook

    def finish(self, output: Any) -> None:
        now = next_sequence_number()
        try:
            tensors = [main_output(output)]
        except TypeError:  # a forward made for stages may return what it likes
            tensors = list(tensors_in(output))
        leaves: list[tuple[Path, torch.Tensor]] = [
            ((("output", None), (i, len(tensors))), tensor) for i, tensor in enumerate(tensors)
        ]
        self.calls.append(Call("", 0, now, now, leaves, tensors[0] if len(tensors) == 1 else None))

    def result(self, model: nn.Module) -> ForwardTrace:
        """Return what was recorded, with a `TracedShape` for every tensor."""
        flow = Flow(self.calls, self.made, self.parameters)
        ran = [i for i, call in enumerate(self.calls) if call.fqn in self.layers]
        bare, late = {}, set()
        for name, uses in flow.direct_uses().items():
            where = "between"
            if ran and min(uses) <= ran[0]:
                where = "before"
            elif ran and min(uses) > ran[-1]:
                where = "after"
                late.add(name)
            bare[name] = where
        units = frozenset(
            call.fqn
            for call in self.calls[:-1]
            if call.fqn not in self.layers
            and next(model.get_submodule(call.fqn).parameters(), None) is not None
        )
        crossings: list[Crossing] = []
        if ran and self.hidden_path is not None:
            last = self.calls[ran[-1]].output
            exit_ = last[0] if isinstance(last, tuple | list) else last
            for boundary in range(len(self.layers) + 1):
                hidden = (self.hidden_path, exit_)
                cut = Cut(flow, self.layers, boundary, frozenset(late), units, hidden)
                crossings.append(_traced(cut.crossing(), flow))
        keyword = self.hidden_path[0][0] if self.hidden_path else None
        return ForwardTrace(
            tuple(call.fqn for call in self.calls[:-1]),
            {call.fqn: map_tensors(call.output, TracedShape.of) for call in self.calls},
            tuple(crossings),
            keyword if isinstance(keyword, str) else None,
            bare,
        )


def main_output(output: Any) -> torch.Tensor:
    """Return the logits, else the last hidden states, of what an architecture's forward returned.

    The two logits of question answering, of a span's start and end, are returned as one tensor
    `[B, S, 2]`, as the head computed them.

    Raises:
        TypeError: If there are none.
        ValueError: If there are several and one alone would be returned.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        named = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
        logits = [name for name in named if name.endswith("logits")]
        if logits == ["start_logits", "end_logits"]:
            return torch.stack([named[name] for name in logits], dim=-1)
        _only(logits)
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        _only([f"output[{i}]" for i, each in enumerate(output) if isinstance(each, torch.Tensor)])
        return output[0]
    raise TypeError(
        f"the model's forward returned a {type(output).__name__} without logits or "
        "last_hidden_state; a stage must return a tensor. If its forward is made for stages, set "
        "patch_causal_lm_model=False"
    )


def _only(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise ValueError(
            f"the model's forward returns more than one tensor ({', '.join(names)}); the last "
            "stage returns one"
        )


def _traced(crossing: Crossing, flow: Flow) -> Crossing:
    """Return a crossing with traced shapes in the place of its tensors."""
    slots = tuple(
        replace(slot, shape=(TracedShape.of(slot.shape), flow.reaches_output(slot.shape)))
        for slot in crossing.slots
    )
    return replace(crossing, slots=slots)


def _leaves_lengths_open(trace: ForwardTrace) -> bool:
    """Whether there is more than hidden states in whose shape the length can be seen."""
    return any(
        len(crossing.slots) > 1 or not slot.shape[0].has_length
        for crossing in trace.crossings
        for slot in crossing.slots
    )


def _with_shapes(short: ForwardTrace, long: ForwardTrace | None) -> ForwardTrace:
    """Return a trace with shapes as functions of batch size and length."""
    others = long.crossings if long else (None,) * len(short.crossings)
    crossings = []
    for crossing, other in zip(short.crossings, others, strict=True):
        slots = []
        for i, slot in enumerate(crossing.slots):
            traced, reached = slot.shape
            shape = shape_of(traced, other.slots[i].shape[0] if other else None)
            # Hidden states always take a gradient, also where nothing before them is trained.
            reached = (reached or i == 0) and shape.dtype.is_floating_point
            slots.append(replace(slot, shape=replace(shape, requires_grad=reached)))
        crossings.append(replace(crossing, slots=tuple(slots)))
    return replace(
        short,
        outputs=map_shapes(short.outputs, long.outputs if long else None),
        crossings=tuple(crossings),
    )


def _first_tensor_keyword(kwargs: dict[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
