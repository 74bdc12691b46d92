"""What a model costs, measured part by part on the device that is to run it."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pp_autopipeline.counting import Given, count_parts, loss_of
from pp_autopipeline.estimate import part_costs, warn_of_encoders
from pp_autopipeline.saved import SavedTensors, memory_of
from pp_autopipeline.workload import Workload
from pp_patch_hf import patch_hf_model_for_pp
from pp_schedule import Costs, LayerCosts
from pp_split_hf import (
    ModelLayout,
    find_layout,
    initialize_stage_weights,
    move_stages,
    plan_stage_fqns,
    split_model_into_stages,
)
from pp_split_hf.dtypes import cast_dtypes
from pp_split_hf.shapes import tensors_in


def measure_costs(
    model: nn.Module,
    *,
    device: torch.device | str | int,
    seq_len: int,
    microbatch_size: int = 1,
    repeats: int = 5,
    layout: ModelLayout | None = None,
    dtype: torch.dtype | None = None,
    optimizer_bytes_per_parameter: float | None = None,
) -> Costs:
    """Return what a model costs for one microbatch: work in seconds, measured, and bytes.

    Of layers that do the same one is run, with random inputs of the shapes that the model gives it;
    then what comes before the layers, and what comes after them with a loss. One of these is on the
    device at a time: a model that is too big for it can be measured, on the meta device too, whose
    weights are random then. What is on the device already is used where it is.

    Times are medians. The input half of a backward is that of `torch.autograd.grad` for the inputs
    alone, the weight half what the gradients of all parameters take beyond it. Code between two
    layers is not measured. Activations of layers and of what comes after them are what autograd
    saves on the device; the rest is as in `estimate_costs`.

    Ranks that measure each for itself find different numbers: measure on one and share them, in a
    file (`Costs.to_json`) for example.

    Args:
        model: A Hugging Face model, on any device; it is not changed.
        device: Where to run.
        seq_len: Tokens per row.
        microbatch_size: Rows.
        repeats: How often each part runs, after a first time that does not count.
        layout: Of the model, if known already.
        dtype: The dtype that floating point parameters will have; None keeps the model's.
        optimizer_bytes_per_parameter: As for `estimate_costs`.

    Raises:
        ValueError: Naming everything that is wrong; if the model has no decoder layers.
        RuntimeError: If the forward cannot run on fake tensors, or a part not on the device.
    """
    device = torch.device(device)
    layout = layout or find_layout(model, dtype)
    work = Workload(model, layout, seq_len, microbatch_size, dtype, optimizer_bytes_per_parameter)
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats={repeats!r} must be an integer of at least 1")
    counted = count_parts(model, layout, microbatch_size, seq_len, dtype)
    warn_of_encoders(model, layout)
    bench = _Bench(work, device, repeats)
    costs = [part_costs(model, layout, index, part) for index, part in enumerate(counted)]
    measured: dict[Any, LayerCosts] = {}
    for index, part in enumerate(counted[1:-1]):
        if part.kind not in measured:
            measured[part.kind] = bench.measure(bench.layer(index, part.given))
        costs[index + 1] = measured[part.kind]
    # What stages make anew, such as masks, is counted with what comes before the layers.
    first = bench.measure(bench.first())
    costs[0] = replace(first, activation_bytes=costs[0].activation_bytes)
    costs[-1] = bench.measure(bench.last())
    return work.costs(costs)


@dataclass
class _Part:
    """A part that can be run alone."""

    run: Callable[[Given], list[torch.Tensor]]
    """Its forward; returns what goes on."""
    make_given: Callable[[], Given]
    """Makes what it is given."""
    module: nn.Module
    """What has its parameters."""
    is_last: bool = False
    """Whether a stage keeps what it returns."""


class _Bench:
    """Runs parts of a model on a device, one at a time."""

    def __init__(self, work: Workload, device: torch.device, repeats: int) -> None:
        self.work, self.device, self.repeats = work, device, repeats
        self._generator = torch.Generator(device).manual_seed(0)
        self._casts = {id(p): cast for _, p, cast in cast_dtypes(work.model, work.dtype)}

    def layer(self, index: int, given: Given) -> _Part:
        """Return a layer that has its weights on the device."""
        layer = self.work.model.get_submodule(self.work.layout.layer_fqns[index])
        memo: dict[int, Any] = {id(b): self._real(b, b.dtype) for b in layer.buffers()}
        for parameter in layer.parameters():
            real = self._real(parameter, self._casts[id(parameter)])
            memo[id(parameter)] = nn.Parameter(real, requires_grad=parameter.requires_grad)
        alone = copy.deepcopy(layer, memo)

        def run(given: Given) -> list[torch.Tensor]:
            return list(tensors_in(alone(*given[0], **given[1])))

        return _Part(run, lambda: self._like(given), alone)

    def first(self) -> _Part:
        """Return what comes before the layers."""
        stage = self._stage((0, self.work.layout.num_layers), 0)

        def run(given: Given) -> list[torch.Tensor]:
            return list(tensors_in(stage(*given[0])))

        return _Part(run, lambda: ((self._ids(),), {}), stage)

    def last(self) -> _Part:
        """Return what comes after the layers, and the loss."""
        work = self.work
        stage = self._stage((work.layout.num_layers, 0), 1)
        slots = work.layout.trace.crossings[-1].slots
        sizes = (work.microbatch_size, work.seq_len)

        def make_given() -> Given:
            shapes = tuple(slot.shape.tensor(*sizes) for slot in slots)
            return self._like(shapes), {"input_ids": self._ids()}

        def run(given: Given) -> list[torch.Tensor]:
            output = stage(*given[0], **given[1])
            return [loss_of(output, work.layout), output]

        return _Part(run, make_given, stage, is_last=True)

    def measure(self, part: _Part) -> LayerCosts:
        """Return what a part costs, its own parameters left out."""
        weights = [weight for weight in part.module.parameters() if weight.requires_grad]
        kept = self._kept_bytes(part)
        times = [self._time(part, weights) for _ in range(self.repeats)]
        forward, on_input, both = (median(column) for column in zip(*times, strict=True))
        return LayerCosts(forward, min(on_input, both), max(0.0, both - on_input), kept)

    def _time(self, part: _Part, weights: Sequence[torch.Tensor]) -> tuple[float, float, float]:
        given = part.make_given()
        inputs = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        begin = self._now()
        outputs = [t for t in part.run(given) if t.requires_grad]
        if part.is_last:
            del outputs[1:]
        forward = self._now() - begin
        gradients = [torch.ones_like(output) for output in outputs]
        halves = []
        for wanted, retain in ((inputs, True), ([*inputs, *weights], False)):
            begin = self._now()
            if outputs and wanted:
                torch.autograd.grad(
                    outputs, wanted, gradients, retain_graph=retain, allow_unused=True
                )
            halves.append(self._now() - begin if wanted else 0.0)
        return forward, halves[0], halves[1]

    def _kept_bytes(self, part: _Part) -> int:
        """Run a forward, and return the bytes that it and what it was given keep."""
        given = part.make_given()
        inputs = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        saved = SavedTensors()
        with saved_tensors_hooks(saved.keep, lambda kept: kept):
            outputs = part.run(given)
        if part.is_last:
            saved.add(outputs.pop())
        tensors = (*part.module.parameters(), *part.module.buffers())
        # What else a layer returns, such as attention, does not go on to the next.
        apart = memory_of([*tensors_in(given), *outputs[:1], *tensors])
        return sum(tensor.nbytes for tensor in inputs) + saved.num_bytes(apart)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def _stage(self, layer_counts: tuple[int, int], index: int) -> nn.Module:
        work = self.work
        # What keeps the first layers on one stage are images, and here are none.
        crossings = tuple(
            replace(crossing, problem=None) if crossing.slots else crossing
            for crossing in work.layout.trace.crossings
        )
        layout = replace(work.layout, trace=replace(work.layout.trace, crossings=crossings))
        names = plan_stage_fqns(layout, layer_counts)
        [stage] = split_model_into_stages(work.model, names, [index], layout)
        move_stages([stage], self.device, work.dtype)
        initialize_stage_weights(stage, self.device, work.dtype)
        patch_hf_model_for_pp(stage)
        return stage

    def _ids(self) -> torch.Tensor:
        """Random ids: the gradient of an embedding takes longer where all are the same."""
        config: Any = self.work.model.config
        return torch.randint(
            getattr(config.get_text_config(decoder=True), "vocab_size", 1),
            (self.work.microbatch_size, self.work.seq_len),
            generator=self._generator,
            device=self.device,
        )

    def _like(self, values: Any) -> Any:
        """Return arguments with real tensors on the device in the place of those without values."""
        if isinstance(values, torch.Tensor):
            return self._random(values, values.dtype).requires_grad_(values.requires_grad)
        if isinstance(values, tuple | list):
            return type(values)([self._like(value) for value in values])
        if isinstance(values, dict):
            return {key: self._like(value) for key, value in values.items()}
        return values

    def _real(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device: itself, if it has values."""
        if tensor.device.type != "meta":
            return tensor.detach().to(self.device, dtype)
        return self._random(tensor, dtype).mul_(0.02)

    def _random(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(
                like.shape, dtype=dtype, device=self.device, generator=self._generator
            )
        return torch.zeros(like.shape, dtype=dtype, device=self.device)
