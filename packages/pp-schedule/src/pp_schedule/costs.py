"""What a model costs, layer by layer: the numbers that a split and a schedule are chosen by.

No torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pp_schedule.stage_costs import StageCosts


@dataclass(frozen=True)
class LayerCosts:
    """What one part of a model costs for one microbatch.

    Work is in seconds, or in any unit that is the same for the whole model, such as FLOPs; see
    `Costs`.
    """

    forward: float = 0.0
    """Work of the forward."""
    backward_input: float = 0.0
    """Work of the gradient of the input."""
    backward_weight: float = 0.0
    """Work of the gradients of the weights."""
    activation_bytes: float = 0.0
    """Bytes that the forward leaves for the backward."""
    parameter_bytes: float = 0.0
    """Bytes that are there all the time: parameters, gradients, optimizer state."""

    @property
    def work(self) -> float:
        """Forward and both halves of the backward."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Costs:
    """What a model costs for one microbatch.

    Work is in seconds, or in any unit that is the same for the whole model; `latency` and
    `overhead` are in the same unit, and `bandwidth` in bytes per unit of it. From FLOPs,
    `in_seconds` makes seconds.

    Raises:
        ValueError: Naming every number that is negative or infinite.
    """

    layers: Sequence[LayerCosts]
    """One entry per decoder layer."""
    first: LayerCosts = LayerCosts()
    """What the first stage has before the layers: the embedding."""
    last: LayerCosts = LayerCosts()
    """What the last stage has after the layers: final norm, head and loss."""
    boundary_bytes: float = 0.0
    """Bytes of what a stage sends on to the next; its gradient is as large."""
    kept_for_weight: float = 1.0
    """Share of the activations still held between the halves of a backward; see `StageCosts`."""
    latency: float = 0.0
    """Time that a message takes besides its bytes."""
    bandwidth: float = math.inf
    """Bytes per unit of time between neighbours, in each direction."""
    overhead: float = 0.0
    """Time that every action takes besides its work; see `StageCosts`."""
    split_factor: float = 1.0
    """Time of a backward's two halves over that of the backward in one piece; see `StageCosts`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        problems = [] if self.layers else ["layers is empty"]
        for part, costs in self._parts().items():
            problems += [
                f"{part}.{name} {value} must be a finite number, 0 or more"
                for name, value in asdict(costs).items()
                if not 0 <= value < math.inf
            ]
        for name in _NUMBERS:
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} {getattr(self, name)} must be a finite number, 0 or more")
        if not self.bandwidth > 0:
            problems.append(f"bandwidth {self.bandwidth} must be above 0")
        _raise_if(problems, "these are no costs of a model")

    def for_stages(self, layer_counts: Sequence[int]) -> StageCosts:
        """Return the costs of stages that have so many layers each, in the model's order.

        Raises:
            ValueError: If the counts are not those of this model's layers.
        """
        problems = [f"{n} layers on stage {s}" for s, n in enumerate(layer_counts) if n < 0]
        if sum(layer_counts) != len(self.layers):
            problems.append(
                f"layer_counts {list(layer_counts)} sum to {sum(layer_counts)}, but the model has "
                f"{len(self.layers)} layers"
            )
        _raise_if(problems, "these layer counts do not fit the model")
        stages: list[list[LayerCosts]] = []
        low = 0
        for count in layer_counts:
            stages.append(list(self.layers[low : low + count]))
            low += count
        stages[0].append(self.first)
        stages[-1].append(self.last)
        sums = {
            field.name: [sum(getattr(part, field.name) for part in stage) for stage in stages]
            for field in fields(LayerCosts)
        }
        return StageCosts(
            **sums,
            bandwidth=self.bandwidth,
            **{name: getattr(self, name) for name in _NUMBERS},
        )

    def in_seconds(self, work_per_second: float) -> "Costs":
        """Return these costs with each work divided by a speed, such as FLOPs per second.

        `latency`, `bandwidth` and `overhead` are taken to be in seconds already.
        """

        def timed(part: LayerCosts) -> LayerCosts:
            names = ("forward", "backward_input", "backward_weight")
            return replace(part, **{name: getattr(part, name) / work_per_second for name in names})

        layers = [timed(layer) for layer in self.layers]
        return replace(self, layers=layers, first=timed(self.first), last=timed(self.last))

    def for_rows(self, num_rows: int) -> "Costs":
        """Return the costs of a microbatch that has so many times the rows of this one.

        Work, activations and messages grow with the rows; parameters, latency and overhead do not.
        Small microbatches use a device less well than that: measure those that matter.
        """

        def grown(part: LayerCosts) -> LayerCosts:
            names = ("forward", "backward_input", "backward_weight", "activation_bytes")
            return replace(part, **{name: getattr(part, name) * num_rows for name in names})

        return replace(
            self,
            layers=[grown(layer) for layer in self.layers],
            first=grown(self.first),
            last=grown(self.last),
            boundary_bytes=self.boundary_bytes * num_rows,
        )

    def to_json(self, path: str | Path) -> None:
        """Write the costs as JSON; an unlimited bandwidth is written as null."""
        content = asdict(self)
        if math.isinf(self.bandwidth):
            content["bandwidth"] = None
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> "Costs":
        """Read what `to_json` wrote; fields that are left out have their defaults.

        Beside what was written, `num_layers` may say how many layers there are: it is checked, and
        a single entry in `layers` then stands for all of them.

        Raises:
            ValueError: Naming every field that is unknown or no number, and a wrong length.
        """
        content = json.loads(Path(path).read_text())
        problems: list[str] = []
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no costs: it must be an object, not {content!r:.40}")
        layers = _read_layers(content.pop("layers", []), content.pop("num_layers", None), problems)
        parts: dict[str, Any] = {
            name: _read_part(content.pop(name), name, problems)
            for name in ("first", "last")
            if name in content
        }
        if content.get("bandwidth", 0) is None:
            content["bandwidth"] = math.inf
        names = {field.name for field in fields(cls)}
        numbers = _read_numbers(content, names - {"layers", "first", "last"}, "", problems)
        try:  # so that numbers out of range are named along with the rest
            costs = cls(layers, **parts, **numbers)
        except ValueError as error:
            problems.append(str(error).partition(": ")[2])
        _raise_if(problems, f"{path} holds no costs")
        return costs

    def _parts(self) -> dict[str, LayerCosts]:
        layers = {f"layers[{index}]": layer for index, layer in enumerate(self.layers)}
        return {**layers, "first": self.first, "last": self.last}


_NUMBERS = ("boundary_bytes", "kept_for_weight", "latency", "overhead", "split_factor")


def _read_layers(content: Any, count: Any, problems: list[str]) -> list[LayerCosts]:
    if not isinstance(content, list):
        problems.append(f"layers must be a list with an entry per layer, not {content!r:.40}")
        return []
    layers = [_read_part(entry, f"layers[{i}]", problems) for i, entry in enumerate(content)]
    if count is None:
        return layers
    if not isinstance(count, int) or count < 1:
        problems.append(f"num_layers must be a whole number, 1 or more, not {count!r:.40}")
    elif len(layers) == 1:
        return layers * count
    elif len(layers) != count:
        problems.append(f"layers has {len(layers)} entries, but num_layers is {count}")
    return layers


def _read_part(content: Any, where: str, problems: list[str]) -> LayerCosts:
    if not isinstance(content, dict):
        problems.append(f"{where} must be an object, not {content!r:.40}")
        return LayerCosts()
    names = {field.name for field in fields(LayerCosts)}
    return LayerCosts(**_read_numbers(content, names, f"{where}.", problems))


def _read_numbers(
    content: Mapping[str, Any], names: set[str], prefix: str, problems: list[str]
) -> dict[str, Any]:
    numbers = {}
    for name, value in content.items():
        if name not in names:
            problems.append(f"there is no field {prefix}{name}; known: {', '.join(sorted(names))}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{prefix}{name} must be a number, not {value!r:.40}")
        else:
            numbers[name] = value
    return numbers


def _raise_if(problems: list[str], what: str) -> None:
    if problems:
        raise ValueError(f"{what}: " + "; ".join(problems))
