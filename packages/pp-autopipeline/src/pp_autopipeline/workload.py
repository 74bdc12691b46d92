"""What costs are asked for: a model, and the microbatch that it is to train on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pp_autopipeline.checks import refuse
from pp_autopipeline.parts import learned_positions, owned_parameters
from pp_schedule import Costs, LayerCosts
from pp_split_hf import ModelLayout
from pp_split_hf.dtypes import cast_dtypes


@dataclass(frozen=True)
class Workload:
    """A model and a microbatch.

    Raises:
        ValueError: Naming everything that is wrong.
    """

    model: nn.Module
    """The whole model, on any device."""
    layout: ModelLayout
    """Of the model."""
    seq_len: int
    """Tokens per row."""
    microbatch_size: int
    """Rows."""
    dtype: torch.dtype | None
    """What floating point parameters are taken to be; None means what they are."""
    optimizer_bytes_per_parameter: float | None
    """None means two numbers in the parameter's dtype, as AdamW keeps them."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("seq_len", "microbatch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name}={value!r} must be an integer of at least 1")
        state = self.optimizer_bytes_per_parameter
        if state is not None and not 0 <= state < float("inf"):
            problems.append(
                f"optimizer_bytes_per_parameter={state!r} must be 0 or more (AdamW in float32: 8)"
            )
        positions = learned_positions(self.model, self.layout)
        if not problems and positions is not None and self.seq_len > positions:
            problems.append(f"seq_len={self.seq_len}: the model has {positions} positions")
        unused = set(self.layout.layer_fqns) - set(self.layout.trace.order)
        if unused:
            missing = [fqn for fqn in self.layout.layer_fqns if fqn in unused]
            problems.append(f"it never runs {', '.join(missing)}")
        refuse(f"cannot tell the costs of {type(self.model).__name__}", problems)

    def costs(self, parts: Sequence[LayerCosts]) -> Costs:
        """Return the costs of the model from those of its parts, which lack parameters."""
        weights = self._parameter_bytes()
        first, *layers, last = (
            replace(part, parameter_bytes=size) for part, size in zip(parts, weights, strict=True)
        )
        return Costs(layers, first, last, boundary_bytes=self._boundary_bytes())

    def _parameter_bytes(self) -> list[float]:
        """Weights, and for those that are trained a gradient and the optimizer's state."""
        casts = {name: cast for name, _, cast in cast_dtypes(self.model, self.dtype)}
        sums = []
        for part in owned_parameters(self.model, self.layout):
            total = 0.0
            for name, parameter in part.items():
                size = casts[name].itemsize
                state = self.optimizer_bytes_per_parameter
                trained = size + (2 * size if state is None else state)
                total += parameter.numel() * (size + trained * parameter.requires_grad)
            sums.append(total)
        return sums

    def _boundary_bytes(self) -> float:
        """What crosses the widest boundary at which the model can be cut."""
        trace = self.layout.trace
        inner = [cut for cut in trace.cuts if 0 < cut < self.layout.num_layers]
        sizes = [
            sum(
                slot.shape.tensor(self.microbatch_size, self.seq_len).nbytes
                for slot in trace.crossings[cut].slots
            )
            for cut in inner or trace.cuts
        ]
        return float(max(sizes, default=0))
