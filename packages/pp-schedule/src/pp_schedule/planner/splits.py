"""Splits worth trying: layers per stage. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from pp_schedule.balancing import balance, even_counts
from pp_schedule.costs import Costs
from pp_schedule.orders import Order
from pp_schedule.placement import PlacementStyle, stage_ids_this_rank
from pp_schedule.planner.polish import activation_peaks
from pp_schedule.simulator import step_time
from pp_schedule.stage_costs import StageCosts

_SLACKS = (0.0, 0.02, 0.05)


@dataclass(frozen=True)
class Placement:
    """Which stages are on which rank."""

    pp_size: int
    """Ranks."""
    stages_per_rank: int
    """Stages of each."""
    style: PlacementStyle
    """See `stage_ids_this_rank`."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp_size * self.stages_per_rank

    @property
    def stage_ids(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of every rank."""
        return {
            rank: stage_ids_this_rank(rank, self.pp_size, self.num_stages, self.style)
            for rank in range(self.pp_size)
        }


def placements(pp_size: int, num_layers: int, max_stages_per_rank: int) -> list[Placement]:
    """Return every placement with at most so many stages per rank and no more stages than parts.

    Parts are the layers, and what comes before and after them.
    """
    found = [Placement(pp_size, 1, "loop")]
    for per_rank in range(2, max_stages_per_rank + 1):
        if pp_size * per_rank <= num_layers + 2:
            found.append(Placement(pp_size, per_rank, "loop"))
            if per_rank == 2 and pp_size > 1:
                found.append(Placement(pp_size, 2, "v"))
    return found


def splits(costs: Costs, placement: Placement) -> list[tuple[int, ...]]:
    """Return the even split and balanced ones, from the lightest heaviest rank to even stages."""
    work = [layer.work for layer in costs.layers]
    found = [even_counts(len(work), placement.num_stages)]
    for slack in _SLACKS if placement.stages_per_rank > 1 else _SLACKS[:1]:
        found.append(
            balance(
                work,
                costs.first.work,
                costs.last.work,
                placement.num_stages,
                placement.pp_size,
                placement.style,
                slack,
            )
        )
    return list(dict.fromkeys(found))


def lighten(
    counts: tuple[int, ...],
    costs: Costs,
    placement: Placement,
    order: Order,
    memory_limit: float,
    num_tries: int,
) -> tuple[int, ...]:
    """Move layers, one at a time, until an order fits the memory, and then while it gets faster.

    Args:
        counts: Layers per stage to begin with.
        costs: What the model costs.
        placement: Which stages are on which rank.
        order: An order of these stages.
        memory_limit: Bytes per rank.
        num_tries: How many splits to look at, at most.
    """
    tried: dict[tuple[int, ...], tuple[float, float]] = {}

    def key(counts: tuple[int, ...]) -> tuple[float, float]:
        if counts not in tried:
            stage_costs = costs.for_stages(counts)
            needs = memory_needs(order, stage_costs, placement.stage_ids)
            # Of all ranks together: relieving one of two that are over is a step ahead.
            excess = sum(max(0.0, need - memory_limit) for need in needs)
            tried[counts] = excess, step_time(order, stage_costs)
        return tried[counts]

    best = counts
    while len(tried) < num_tries:
        near = [moved for moved in _neighbours(best) if moved not in tried][
            : max(1, num_tries - len(tried))
        ]
        if not near:
            break
        found = min(near, key=key)
        if key(found) >= key(best):
            break
        best = found
    return best


def memory_needs(
    order: Order, costs: StageCosts, stage_ids: Mapping[int, Sequence[int]]
) -> list[float]:
    """Return bytes per rank: what is always there, and the most activations.

    Receive buffers that come and go are left out, as they depend on the clock.
    """
    num_stages = sum(map(len, stage_ids.values()))
    parameters, buffers = (
        costs.per_stage(name, num_stages) for name in ("parameter_bytes", "buffer_bytes")
    )
    return [
        peak + sum(parameters[stage] + buffers[stage] for stage in stage_ids[rank])
        for rank, peak in enumerate(activation_peaks(order, costs))
    ]


def _neighbours(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    moves = []
    for source, target in permutations(range(len(counts)), 2):
        if counts[source]:
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            moves.append(tuple(moved))
    return moves
