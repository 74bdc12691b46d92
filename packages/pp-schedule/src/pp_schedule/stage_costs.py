"""What each stage of a pipeline costs: times of its actions, bytes, and its links. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pp_schedule.orders import Action

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True)
class StageCosts:
    """Times and bytes per stage: each field one number for all stages, or one per stage.

    Any unit of time will do, if it is the same everywhere; `bandwidth` is in bytes per unit of it.

    Raises:
        ValueError: Naming every field that is negative or infinite, or whose number of stages is
            not that of another field.
    """

    forward: PerStage = 1.0
    """Time of a forward of one microbatch."""
    backward_input: PerStage = 1.0
    """Time of the input half of a backward; a full backward takes both halves."""
    backward_weight: PerStage = 1.0
    """Time of the weight half of a backward."""
    activation_bytes: PerStage = 0.0
    """Bytes that a forward of one microbatch leaves for its backward, the stage's input included."""
    kept_for_weight: PerStage = 1.0
    """Share of `activation_bytes` that is still held between the two halves of a split backward.

    torch frees with the weight half (2.13 to 2.15), hence 1. It may be more: the weight half also
    needs gradients that the input half made. Stage 0 frees nothing before its weight half, which
    is its whole backward.
    """
    boundary_bytes: PerStage = 0.0
    """Bytes of what one microbatch sends on to the next stage; its gradient is as large."""
    parameter_bytes: PerStage = 0.0
    """Bytes that are there all the step: parameters, gradients, optimizer state."""
    buffer_bytes: PerStage | None = None
    """Bytes of receive buffers that are there all the step, such as those of a pool.

    None: each receive is allocated as its transfer begins. A forward's becomes part of the
    activation as it starts; a backward's is freed as it ends.
    """
    latency: PerStage = 0.0
    """Time that a message takes besides its bytes, on the link from a stage to the next and back.

    Messages can follow each other within it: it keeps no link busy.
    """
    bandwidth: PerStage = math.inf
    """Bytes per unit of time on the link from a stage to the next, and as many back."""
    overhead: PerStage = 0.0
    """Time that every action takes besides its work, such as that of torch's runtime."""
    split_factor: PerStage = 1.0
    """Time of a backward's two halves over that of the backward in one piece: 1 or more.

    torch goes over the graph twice for halves (2.13 to 2.15). It may differ by stage; stage 0 runs
    its whole backward as the weight half.
    """

    def __post_init__(self) -> None:
        problems, lengths = [], {}
        for name in _NAMES:
            value = getattr(self, name)
            if value is None and name == "buffer_bytes":
                continue
            numbers = [value] if isinstance(value, int | float) else list(value)
            if not isinstance(value, int | float):
                lengths[name] = len(numbers)
            if name == "bandwidth":
                problems += [f"{name} {x} must be above 0" for x in numbers if not x > 0]
            else:
                problems += [
                    f"{name} {x} must be a finite number, 0 or more"
                    for x in numbers
                    if not 0 <= x < math.inf
                ]
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"{name} {length}" for name, length in lengths.items())
            problems.append(f"every sequence needs one number per stage, but they have {given}")
        if problems:
            raise ValueError("these are no costs of stages: " + "; ".join(problems))

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """Return a field as one number per stage.

        Raises:
            ValueError: If the field has another number of stages.
        """
        value = getattr(self, name)
        if value is None:
            return [0.0] * num_stages
        if isinstance(value, int | float):
            return [float(value)] * num_stages
        if len(value) != num_stages:
            raise ValueError(
                f"{name} is given for {len(value)} stages, but there are {num_stages}; give one "
                "number per stage, or one for all"
            )
        return [float(number) for number in value]

    def durations(self, num_stages: int) -> dict[str, list[float]]:
        """Return the time of each kind of action, per stage.

        As torch runs it, stage 0 has no input to differentiate for: its input half is no work
        and its weight half is the whole backward.
        """
        forward, on_input, on_weight = (
            self.per_stage(name, num_stages)
            for name in ("forward", "backward_input", "backward_weight")
        )
        both = [i + w for i, w in zip(on_input, on_weight, strict=True)]
        factor = self.per_stage("split_factor", num_stages)
        on_input = [i * f for i, f in zip(on_input, factor, strict=True)]
        on_weight = [w * f for w, f in zip(on_weight, factor, strict=True)]
        work = {
            "F": forward,
            "B": both,
            "I": [0.0, *on_input[1:]],
            "W": [both[0], *on_weight[1:]],
        }
        overhead = self.per_stage("overhead", num_stages)
        return {
            kind: [time + more for time, more in zip(times, overhead, strict=True)]
            for kind, times in work.items()
        }

    def of(self, action: Action) -> float:
        """Return the time that `action` takes."""
        given = (getattr(self, name) for name in _NAMES)
        lengths = [len(value) for value in given if isinstance(value, Sequence)]
        num_stages = lengths[0] if lengths else action.stage_index + 1
        return self.durations(num_stages)[action.kind][action.stage_index]


_NAMES = tuple(field.name for field in fields(StageCosts))
