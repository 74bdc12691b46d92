"""Schedule names: what may be typed, which torch class it means, and that class's rules."""

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from pp_schedule.placement import PlacementStyle

MicrobatchRule = Literal["any", "one per stage", "two per rank", "whole rounds"]


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule name stands for, and the rules of its torch class (2.13 to 2.15)."""

    name: str
    """The name this project prints: lower case, without separators."""
    class_name: str
    """The class in `torch.distributed.pipelining.schedules`."""
    style: PlacementStyle
    """How stages are placed; see `stage_ids_this_rank`."""
    stages_per_rank: int | None
    """The number of stages that every rank must have; None if any number will do."""
    splits_backward: bool
    """Whether input and weight gradients are computed apart (zero bubble)."""
    microbatch_rule: MicrobatchRule
    """How many microbatches it takes: any; at least one per stage; at least two per rank; or, with
    n microbatches in max(1, n // pp_size) rounds, rounds of equal length."""

    @property
    def cls(self) -> type[Any]:
        """The torch class; torch is imported for it."""
        schedules = import_module("torch.distributed.pipelining.schedules")
        schedule_class: type[Any] = getattr(schedules, self.class_name)
        return schedule_class

    @property
    def single_stage(self) -> bool:
        """Whether a rank runs exactly one stage."""
        return self.stages_per_rank == 1

    def takes(self, pp_size: int, num_stages: int, num_microbatches: int) -> bool:
        """Return whether the microbatch rule holds."""
        if self.microbatch_rule == "one per stage":
            return num_microbatches >= num_stages
        if self.microbatch_rule == "two per rank":
            return num_microbatches >= 2 * pp_size
        if self.microbatch_rule == "whole rounds":
            return num_microbatches % max(1, num_microbatches // pp_size) == 0
        return num_microbatches >= 1

    def check(self, pp_size: int, num_stages: int, num_microbatches: int) -> list[str]:
        """Return what is wrong with the sizes for this schedule, as sentences."""
        problems = []
        per_rank = self.stages_per_rank
        if per_rank is not None and num_stages != per_rank * pp_size:
            problems.append(
                f"schedule {self.name!r} runs exactly {per_rank} stage{'s' * (per_rank > 1)} per "
                f"rank: pp_size={pp_size} needs {per_rank * pp_size} stages, not {num_stages}"
            )
        elif num_stages < 1 or num_stages % pp_size:
            lower = max(0, num_stages - num_stages % pp_size)
            near = f"{lower} or {lower + pp_size}" if lower else f"{pp_size}"
            problems.append(
                f"{num_stages} stages do not divide over pp_size={pp_size} ranks; nearest: {near}"
            )
        if not self.takes(pp_size, num_stages, num_microbatches):
            near = _either(self.nearest_microbatches(pp_size, num_stages, num_microbatches))
            rule = {
                "one per stage": f"at least one microbatch per stage ({num_stages})",
                "two per rank": f"at least two microbatches per rank ({2 * pp_size})",
                "whole rounds": f"microbatches in whole rounds over pp_size={pp_size}",
                "any": "at least one microbatch",
            }[self.microbatch_rule]
            problems.append(
                f"schedule {self.name!r} needs {rule}, not {num_microbatches}; nearest: {near}"
            )
        return problems

    def nearest_microbatches(
        self, pp_size: int, num_stages: int, num_microbatches: int
    ) -> list[int]:
        """Return the two numbers of microbatches that the rule takes and that are nearest."""
        fitting = (
            n
            for n in range(1, 4 * max(num_microbatches, 2 * num_stages))
            if self.takes(pp_size, num_stages, n)
        )
        return sorted(sorted(fitting, key=lambda n: (abs(n - num_microbatches), n))[:2])

    def fitting_sizes(
        self, pp_size: int, num_stages: int, batch: tuple[str, int], microbatch: tuple[str, int]
    ) -> str:
        """Say, in the user's names, which batch or microbatch size would satisfy the rule.

        Args:
            pp_size: Number of ranks.
            num_stages: Number of stages.
            batch: What the user calls the rows per step, and how many there are.
            microbatch: The same of the rows per microbatch, of which `batch` is a multiple.
        """
        (batch_name, rows), (name, per_microbatch) = batch, microbatch
        near = self.nearest_microbatches(pp_size, num_stages, rows // per_microbatch)
        advice = f"use {batch_name}={_either([n * per_microbatch for n in near])}"
        divisors = [
            n
            for n in range(1, rows + 1)
            if rows % n == 0 and self.takes(pp_size, num_stages, rows // n)
        ]
        if divisors:
            advice += f", or {name}={min(divisors, key=lambda n: abs(n - per_microbatch))}"
        made = f"{batch_name} / {name} = {rows} / {per_microbatch}"
        return f"microbatches are {made}: {advice}"


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


_SPECS = {
    spec.name: spec
    for spec in (
        ScheduleSpec("1f1b", "Schedule1F1B", "loop", 1, False, "one per stage"),
        ScheduleSpec("gpipe", "ScheduleGPipe", "loop", 1, False, "any"),
        ScheduleSpec("loopedbfs", "ScheduleLoopedBFS", "loop", None, False, "any"),
        ScheduleSpec(
            "interleaved1f1b", "ScheduleInterleaved1F1B", "loop", None, False, "whole rounds"
        ),
        ScheduleSpec(
            "interleavedzerobubble",
            "ScheduleInterleavedZeroBubble",
            "loop",
            None,
            True,
            "whole rounds",
        ),
        ScheduleSpec("zbvzerobubble", "ScheduleZBVZeroBubble", "v", 2, True, "any"),
        ScheduleSpec("dualpipev", "ScheduleDualPipeV", "v", 2, True, "two per rank"),
        # Our own: what `pp_schedule.planner.auto_order` makes, on torch's runtime.
        ScheduleSpec("auto", "_PipelineScheduleRuntime", "v", 2, True, "any"),
    )
}

# Depth-first looping (Narayanan et al., 2021) is the order of torch's interleaved 1F1B.
_ALIASES = {
    "dfs": "interleaved1f1b",
    "interleaved": "interleaved1f1b",
    "vschedule": "zbvzerobubble",
    "zbv": "zbvzerobubble",
    "zerobubble": "interleavedzerobubble",
}

# torch's `get_schedule_class` knows them too; the last is what runs a schedule file.
_BASE_CLASSES = ("pipelineschedulesingle", "pipelineschedulemulti", "pipelinescheduleruntime")

SCHEDULE_NAMES = (
    "1f1b",
    "gpipe",
    "looped_bfs",
    "interleaved_1f1b",
    "dfs",
    "zero_bubble",
    "interleaved_zero_bubble",
    "v_schedule",
    "zbv_zero_bubble",
    "dualpipev",
    "auto",
)
"""The names to suggest; any case, and any use of `_` and `-`, is understood."""


def resolve_schedule(name: str) -> ScheduleSpec:
    """Return what a schedule name means.

    torch's class names (with or without the leading "Schedule"), NeMo AutoModel's names and the
    common short ones are known, in any case, with or without `_` and `-`.

    Raises:
        ValueError: If no schedule has that name; the nearest names are suggested.
        TypeError: If the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a schedule is named by a string, not by {type(name).__name__} {name!r}")
    key = _plain(name)
    key = key.removeprefix("schedule") or key
    key = _ALIASES.get(key, key)
    if key in _SPECS:
        return _SPECS[key]
    if key in _BASE_CLASSES:
        raise ValueError(
            f"{name!r} is a base class of torch, which has no order of its own: give a schedule "
            f"file, or one of {', '.join(SCHEDULE_NAMES)}"
        )
    known = {_plain(known): known for known in SCHEDULE_NAMES}
    near = [known[match] for match in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"there is no schedule {name!r}: {hint}known: {', '.join(SCHEDULE_NAMES)}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
