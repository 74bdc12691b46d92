"""What each part of a model does for one microbatch, counted in one forward on fake tensors.

A part begins where its first module is given its input: what runs between two layers belongs to
the earlier one, as it does on a stage.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from pp_autopipeline.parts import owned_parameters
from pp_autopipeline.saved import SavedTensors, graph_of, memory_of
from pp_autopipeline.torch_private import flop_counter
from pp_split_hf import FakeModel, ModelLayout, main_output, on_fake_tensors
from pp_split_hf.shapes import tensors_in

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""


@dataclass
class CountedPart:
    """What one part does: what comes before the layers, a layer, or what comes after them."""

    forward: int = 0
    """FLOPs of the forward."""
    backward_input: int = 0
    """FLOPs of the gradients of what it was given."""
    backward_weight: int = 0
    """FLOPs of the gradients of its own trainable parameters."""
    activation_bytes: int = 0
    """Bytes that it keeps for its backward, its input included."""
    input_bytes: int = 0
    """Bytes of what it was given with a gradient."""
    depends_on_values: bool = False
    """Whether how much it does depends on values, so that it cannot be counted."""
    kind: tuple[Hashable, ...] = ()
    """Parts of one kind do the same."""
    given: Given = field(default=((), {}), repr=False)
    """What a layer was given, as fake tensors."""


def count_parts(
    model: nn.Module,
    layout: ModelLayout,
    microbatch_size: int,
    seq_len: int,
    dtype: torch.dtype | None = None,
) -> list[CountedPart]:
    """Run a forward of one microbatch on fake tensors, and behind each part its backward.

    FLOPs are what torch's own counter counts: products of matrices, convolutions, attention; see
    `flop_counter`. The loss is the cross entropy of every token, in float32.

    Args:
        model: The whole model, on any device; it is not changed.
        layout: Of the model.
        microbatch_size: Rows, each of one text.
        seq_len: Tokens per row.
        dtype: What floating point parameters are taken to be; None means what they are.

    Returns:
        What comes before the layers, the layers, what comes after them.

    Raises:
        RuntimeError: If the forward or its backward cannot run on fake tensors.
    """
    handles = []
    trainable = [
        [name for name, parameter in part.items() if parameter.requires_grad]
        for part in owned_parameters(model, layout)
    ]
    try:
        with on_fake_tensors(model, dtype, as_trained=True) as fake, flop_counter() as counter:
            parts = _Parts(layout, fake, counter, trainable)
            for index, fqn in enumerate(layout.layer_fqns, 1):
                layer = model.get_submodule(fqn)
                handles.append(
                    layer.register_forward_pre_hook(parts.enter(index), with_kwargs=True)
                )
                handles.append(layer.register_forward_hook(parts.leave))
            with saved_tensors_hooks(parts.keep, lambda kept: kept):
                output = main_output(fake.run(microbatch_size, seq_len))
                parts.finish(output, loss_of(output, layout))
    finally:
        for handle in handles:
            handle.remove()
    return parts.counted


def loss_of(output: torch.Tensor, layout: ModelLayout) -> torch.Tensor:
    """Return the cross entropy of what a model returned; its sum, if it has no head."""
    if not layout.heads:
        return output.sum()
    scores = output.flatten(0, -2).float()
    target = torch.zeros(scores.shape[0], dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, target)


@dataclass
class _Run:
    """One run of a part, while it lasts."""

    index: int
    inputs: list[torch.Tensor]
    flops: int
    num_selections: int
    saved: SavedTensors = field(default_factory=SavedTensors)


class _Parts:
    """Counts part by part while a forward runs; part 0 comes before the layers."""

    def __init__(
        self,
        layout: ModelLayout,
        fake: FakeModel,
        counter: FlopCounterMode,
        trainable: Sequence[Sequence[str]],
    ) -> None:
        self.counted = [CountedPart() for _ in trainable]
        self._fake = fake
        self._counter = counter
        self._trainable = [[fake.tensors[name] for name in names] for names in trainable]
        self._hidden_keyword = layout.trace.hidden_keyword
        self._calls_left = sum(fqn in layout.layer_fqns for fqn in layout.trace.order)
        self._backwards: dict[Hashable, tuple[int, int]] = {}
        self._entered: list[torch.Tensor] = []
        self._is_countable = True
        # Memory of no part: weights, and what every stage makes anew, such as masks.
        self._weights = memory_of(fake.tensors.values())
        self._shared, self._shared_and_saved = SavedTensors(), SavedTensors()
        self._run = self._begin(0, [])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the backward of the part that runs needs a tensor."""
        return self._run.saved.keep(tensor)

    def enter(self, index: int) -> Any:
        """Return a hook for what is given to a layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
            self._end(list(tensors_in([args, kwargs])))
            self._calls_left -= 1
            keyword = self._hidden_keyword
            args = tuple(_cut(value, i == 0 and not keyword) for i, value in enumerate(args))
            kwargs = {name: _cut(value, name == keyword) for name, value in kwargs.items()}
            tensors = list(tensors_in([args, kwargs]))
            for tensor in tensors:
                if not tensor.requires_grad:
                    self._shared.add(tensor)
            self._run = self._begin(index, [t for t in tensors if t.requires_grad])
            part = self.counted[index]
            part.given = part.given if part.kind else (args, kwargs)
            part.kind += (type(module), *_plain([args, kwargs]))
            return args, kwargs

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the last layer, begin what comes after with the hidden states."""
        if self._calls_left:
            return None
        is_alone = isinstance(output, torch.Tensor)
        hidden = output if is_alone else output[0]
        self._end([hidden])
        hidden = _cut(hidden, is_hidden=True)
        self._run = self._begin(len(self.counted) - 1, [hidden])
        return hidden if is_alone else type(output)([hidden, *output[1:]])

    def finish(self, output: torch.Tensor, loss: torch.Tensor) -> None:
        """End what comes after the layers, which keeps its output, and what comes before them."""
        self._run.saved.add(output)
        self._end([loss])
        first = self.counted[0]
        first.activation_bytes += self._shared_and_saved.num_bytes()
        first.backward_weight = self._count_backward(self._entered, self._trainable[0])

    def _begin(self, index: int, inputs: list[torch.Tensor]) -> _Run:
        return _Run(index, inputs, self._counter.get_total_flops(), self._fake.num_selections)

    def _end(self, leaving: list[torch.Tensor]) -> None:
        """End what runs, with the tensors that go on from it."""
        run, part = self._run, self.counted[self._run.index]
        # Before the layers hardly anything is multiplied: there the largest size will do.
        selected = run.index > 0 and self._fake.num_selections > run.num_selections
        if selected or run.saved.has_unknown_sizes:
            part.depends_on_values = True
            self._is_countable = False
        if not self._is_countable:
            part.kind += (run.index,)
            return
        part.forward += self._counter.get_total_flops() - run.flops
        given = sum(tensor.nbytes for tensor in run.inputs)
        theirs = memory_of([*run.inputs, *leaving])
        part.input_bytes += given
        part.activation_bytes += given + run.saved.num_bytes(self._weights, self._shared, theirs)
        self._shared_and_saved.add_common(run.saved, self._shared)
        outputs = [tensor for tensor in leaving if tensor.requires_grad]
        if run.index < len(self.counted) - 1:  # beyond, a tied head has the embedding's weight
            self._entered += outputs
        if run.index > 0:  # what is made before the layers any of them may use: see `finish`
            self._add_backward(run, part, outputs)

    def _add_backward(self, run: _Run, part: CountedPart, outputs: list[torch.Tensor]) -> None:
        """Count a backward, or remember it: equal graphs on equal shapes cost the same."""
        trainable = self._trainable[run.index]
        weights = [(*weight.shape, weight.dtype) for weight in trainable]
        kind = (part.forward, *run.saved.shapes, *graph_of(outputs, run.inputs), *weights)
        if kind not in self._backwards:
            on_input = self._count_backward(outputs, run.inputs)
            both = self._count_backward(outputs, [*run.inputs, *trainable])
            self._backwards[kind] = (on_input, both - on_input)
        on_input, on_weight = self._backwards[kind]
        part.backward_input += on_input
        part.backward_weight += on_weight
        part.kind += kind

    def _count_backward(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> int:
        if not self._is_countable or not outputs or not inputs:
            return 0
        before = self._counter.get_total_flops()
        gradients = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
        return self._counter.get_total_flops() - before


def _cut(value: Any, is_hidden: bool) -> Any:
    """Return what a part is given, no longer tied to what made it.

    Hidden states always take a gradient, as on a stage. Dicts and lists stay the objects that they
    are: layers put things into them for later ones.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_(value.requires_grad or is_hidden)
    if isinstance(value, tuple):
        return tuple(_cut(each, is_hidden and i == 0) for i, each in enumerate(value))
    return value


def _plain(values: Any) -> list[Hashable]:
    """Return what can be told of arguments: shapes, dtypes, and plain values."""
    if isinstance(values, torch.Tensor):
        return [(*values.shape, values.dtype, values.requires_grad)]
    if isinstance(values, dict):
        return [part for key, value in values.items() for part in (key, *_plain(value))]
    if isinstance(values, tuple | list):
        return [len(values), *(part for value in values for part in _plain(value))]
    if values is None or isinstance(values, bool | int | float | str):
        return [values]
    return [type(values).__qualname__]
