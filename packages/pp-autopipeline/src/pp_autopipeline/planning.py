"""The planner of `pp_schedule`, for a model: what to train it with, in the words of AutoPipeline."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from pp_schedule import Candidate, Costs, LayerCosts, Plan, plan
from pp_split_hf import ModelLayout, check_pipeline_support, find_layout, plan_stage_fqns


@dataclass(frozen=True)
class ModelPlan:
    """What `plan_model` found."""

    plan: Plan
    """Everything that was tried. Where a model cannot be cut before every layer, its layer counts
    are those of the pieces between the cuts."""
    layer_counts: tuple[int, ...]
    """Decoder layers of every stage."""
    stage_fqns: list[list[str]] = field(repr=False)
    """Module names of every stage."""
    batch_size: int
    """Rows per step."""

    @property
    def best(self) -> Candidate:
        """The candidate to train with."""
        return self.plan.best

    @property
    def needs_csv(self) -> bool:
        """Whether the schedule has no name in torch, so that a file must say what it is."""
        return not self.best.is_named

    def settings(self, csv_path: str | Path | None = None) -> dict[str, Any]:
        """Return the arguments of `AutoPipeline` that train so.

        Args:
            csv_path: Where `plan.dump_csv` has written the order; needed if it has no name.

        Raises:
            ValueError: If a file is needed and not given.
        """
        if self.needs_csv and csv_path is None:
            raise ValueError(
                f"schedule {self.best.schedule!r} has no name in torch: write its order with "
                "plan.dump_csv(path) and give csv_path"
            )
        schedule = (
            {"pp_schedule_csv": str(csv_path)}
            if self.needs_csv
            else {"pp_schedule": self.best.schedule}
        )
        return {
            **schedule,
            "pp_microbatch_size": self.best.microbatch_size,
            "pp_batch_size": self.batch_size,
            "module_fqns_per_model_part": self.stage_fqns,
        }


def plan_model(
    model: nn.Module,
    pp_size: int,
    *,
    costs: Costs | Mapping[int, Costs],
    batch_size: int,
    memory_limit: float = math.inf,
    microbatch_size: int | None = None,
    max_stages_per_rank: int = 2,
    effort: float = 1.0,
    layout: ModelLayout | None = None,
) -> ModelPlan:
    """Find the best split, schedule, stages per rank and microbatch size for a model.

    Nothing is sent: every rank may call it, and all get the same. See `pp_schedule.plan`.

    Args:
        model: The whole model, on any device.
        pp_size: Number of pipeline ranks.
        costs: Of one row (see `estimate_costs` and `Costs.in_seconds`), or of microbatches of each
            number of rows that may be used.
        batch_size: Rows per step and pipeline.
        memory_limit: Bytes that a rank has.
        microbatch_size: Rows per microbatch; None searches for it, among those that costs are given
            for.
        max_stages_per_rank: Stages of a rank, at most.
        effort: How much to try.
        layout: Of the model, if known already.

    Raises:
        ValueError: If the model cannot be pipelined, if the costs are of another model, or naming
            everything about the arguments that is wrong.
    """
    layout = layout or find_layout(model)
    problems = check_pipeline_support(model, layout)
    by_size = costs if isinstance(costs, Mapping) else {1: costs}
    lengths = {len(of_size.layers) for of_size in by_size.values()} - {layout.num_layers}
    problems += [
        f"costs has {length} layers, but {type(model).__name__} has {layout.num_layers}"
        for length in sorted(lengths)
    ]
    if microbatch_size is not None and (microbatch_size < 1 or batch_size % microbatch_size):
        problems.append(
            f"microbatch_size={microbatch_size} does not divide batch_size={batch_size}"
        )
    if problems:
        raise ValueError("cannot plan: " + "; ".join(problems))
    cuts = layout.trace.cuts
    pieces = {size: merge_layers(of_size, cuts) for size, of_size in by_size.items()}
    if microbatch_size is not None and not isinstance(costs, Mapping):
        pieces = {microbatch_size: pieces[1].for_rows(microbatch_size)}
    found = plan(
        pieces if isinstance(costs, Mapping) or microbatch_size else pieces[1],
        pp_size,
        batch_size=batch_size,
        memory_limit=memory_limit,
        max_stages_per_rank=max_stages_per_rank,
        effort=effort,
    )
    counts = expand_counts(found.best.layer_counts, cuts, layout.num_layers)
    return ModelPlan(found, counts, plan_stage_fqns(layout, counts), batch_size)


def merge_layers(costs: Costs, cuts: tuple[int, ...]) -> Costs:
    """Return costs in which layers that no cut parts are one.

    Args:
        costs: Of the model.
        cuts: Before which layers it can be cut, ascending; its end among them.
    """
    layers = list(costs.layers)
    return replace(
        costs,
        layers=[_sum(layers[low:high]) for low, high in pairwise(cuts)],
        # What comes before the first cut, and after the last, belongs to the end stages.
        first=_sum([costs.first, *layers[: cuts[0]]]),
        last=_sum([*layers[cuts[-1] :], costs.last]),
    )


def expand_counts(
    piece_counts: tuple[int, ...], cuts: tuple[int, ...], num_layers: int
) -> tuple[int, ...]:
    """Return layers per stage from pieces per stage; the inverse of `merge_layers`."""
    sizes = [high - low for low, high in pairwise(cuts)]
    counts, start = [], 0
    for count in piece_counts:
        counts.append(sum(sizes[start : start + count]))
        start += count
    counts[0] += cuts[0]
    counts[-1] += num_layers - cuts[-1]
    return tuple(counts)


def _sum(parts: list[LayerCosts]) -> LayerCosts:
    return LayerCosts(
        sum(part.forward for part in parts),
        sum(part.backward_input for part in parts),
        sum(part.backward_weight for part in parts),
        sum(part.activation_bytes for part in parts),
        sum(part.parameter_bytes for part in parts),
    )
