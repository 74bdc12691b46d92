"""The last word on drafts: their full simulation, alone and with times that vary. No torch."""

from dataclasses import dataclass, field
from statistics import fmean

from pp_schedule.balancing import Balance
from pp_schedule.costs import Costs
from pp_schedule.named_orders import OWN_ORDERS
from pp_schedule.orders import Order
from pp_schedule.placement import PlacementStyle
from pp_schedule.planner.bound import lower_bound
from pp_schedule.planner.search import OWN, Draft
from pp_schedule.simulator import simulate, step_time
from pp_schedule.timeline import Timeline

_SEEDS = range(3)


@dataclass(frozen=True)
class Candidate:
    """A split, an order and a microbatch size, and how they would do."""

    schedule: str
    """What runs: a name of `resolve_schedule`, one of `zb_h1`, `zb_h2`, `v_half` and `v_min`, or
    `own` for an order that was made for these costs."""
    style: PlacementStyle
    """How stages are placed."""
    layer_counts: tuple[int, ...]
    """Layers per stage."""
    microbatch_size: int
    """Rows per microbatch; 1 if costs were given for a microbatch, whatever its size."""
    num_microbatches: int
    """Microbatches per step."""
    stages_per_rank: int
    """Stages of each rank."""
    step_time: float
    """Makespan, in the unit of the costs."""
    expected_time: float
    """Mean makespan if each action's time varies."""
    ideal_time: float
    """All work of the step, spread evenly over the ranks without waiting."""
    lower_bound: float
    """A time that no order of this split can beat."""
    bubble_fraction: float
    """Mean share of the step in which a rank computes nothing."""
    peak_memory: tuple[float, ...]
    """Bytes per rank at the peak."""
    memory_limit: float
    """Bytes that a rank has."""
    balance: Balance
    """How evenly the split divides the work."""
    order: Order = field(repr=False)
    """The actions of every rank."""
    timeline: Timeline = field(repr=False)
    """The simulated step."""

    @property
    def is_named(self) -> bool:
        """Whether torch has a class for it, so that no schedule file is needed."""
        return self.schedule != OWN and self.schedule not in OWN_ORDERS

    @property
    def fits(self) -> bool:
        """Whether no rank exceeds the memory limit."""
        return max(self.peak_memory) <= self.memory_limit

    @property
    def excess_bytes(self) -> float:
        """Bytes by which the rank that needs most is over the limit, or 0."""
        return max(0.0, max(self.peak_memory) - self.memory_limit)


def judge(
    draft: Draft, costs: Costs, microbatch_size: int, memory_limit: float, jitter: float
) -> Candidate:
    """Simulate a draft in full.

    Args:
        draft: A split and an order.
        costs: For one microbatch.
        microbatch_size: Rows of one.
        memory_limit: Bytes per rank.
        jitter: Spread of action times for `expected_time`; see `step_time`.
    """
    placement, counts = draft.placement, draft.layer_counts
    stage_costs = costs.for_stages(counts)
    timeline = simulate(draft.order, stage_costs)
    num_microbatches = 1 + max(span.action.microbatch for span in timeline.spans)
    varied = [step_time(draft.order, stage_costs, jitter, seed) for seed in _SEEDS]
    work = [layer.work for layer in costs.layers]
    total = sum(work) + costs.first.work + costs.last.work
    return Candidate(
        schedule=draft.schedule,
        style=placement.style,
        layer_counts=counts,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        stages_per_rank=placement.stages_per_rank,
        step_time=timeline.makespan,
        expected_time=fmean(varied) if jitter else timeline.makespan,
        ideal_time=total * num_microbatches / placement.pp_size,
        lower_bound=lower_bound(placement.stage_ids, stage_costs, num_microbatches),
        bubble_fraction=timeline.bubble_fraction,
        peak_memory=timeline.peak_memory,
        memory_limit=memory_limit,
        balance=Balance.of(
            counts, work, costs.first.work, costs.last.work, placement.pp_size, placement.style
        ),
        order=draft.order,
        timeline=timeline,
    )
