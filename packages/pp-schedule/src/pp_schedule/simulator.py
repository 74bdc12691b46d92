"""A clock for orders: when each action starts and ends, and how long ranks idle. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pp_schedule.orders import Action, Order, required_before


class Span(NamedTuple):
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) per action: one number for all stages, or one per stage."""

    forward: float | Sequence[float] = 1.0
    """Time of a forward."""
    backward_input: float | Sequence[float] = 1.0
    """Time of the input half of a backward; a full backward takes both halves."""
    backward_weight: float | Sequence[float] = 1.0
    """Time of the weight half of a backward."""

    def of(self, action: Action) -> float:
        """Return the time that `action` takes.

        As torch runs it, stage 0 has no input to differentiate for: its input half is no work
        and its weight half is the whole backward.
        """
        stage = action.stage_index
        forward, backward_input, backward_weight = (
            cost if isinstance(cost, int | float) else cost[stage]
            for cost in (self.forward, self.backward_input, self.backward_weight)
        )
        if action.kind == "F":
            return forward
        if action.kind == "B" or (action.kind == "W" and stage == 0):
            return backward_input + backward_weight
        if action.kind == "I":
            return 0.0 if stage == 0 else backward_input
        return backward_weight


@dataclass(frozen=True)
class Timeline:
    """What `simulate` returns."""

    spans: tuple[Span, ...] = field(repr=False)
    """Every action with its rank, start and end."""
    makespan: float
    """End of the last action; the first starts at 0."""
    bubbles: tuple[float, ...]
    """Per rank, the share of the makespan (0 to 1) in which it computes nothing."""

    @property
    def bubble_fraction(self) -> float:
        """The mean of `bubbles`."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(order: Order, costs: Costs | None = None) -> Timeline:
    """Run an order against a clock: an action starts when its rank is free and its input is there.

    Sending takes no time. Idle steps (`None`) take no time either: waiting follows from what an
    action needs.

    Args:
        order: Actions per rank; see `pp_schedule.orders`.
        costs: Times per action; the default counts a backward as two forwards.

    Raises:
        ValueError: If some action waits for ever.
    """
    costs = costs or Costs()
    actions = [action for row in order.values() for action in row if action is not None]
    num_stages = max(action.stage_index for action in actions) + 1
    splits = {(a.stage_index, a.microbatch) for a in actions if a.kind == "I"}
    ends: dict[Action, float] = {}
    free = dict.fromkeys(order, 0.0)
    busy = dict.fromkeys(order, 0.0)
    position = dict.fromkeys(order, 0)
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for rank, row in order.items():
            while position[rank] < len(row):
                action = row[position[rank]]
                if action is not None:
                    split = (action.stage_index + 1, action.microbatch) in splits
                    before = required_before(action, num_stages, split)
                    if any(b not in ends for b in before):
                        break
                    start = max([free[rank], *(ends[b] for b in before)])
                    free[rank] = ends[action] = start + costs.of(action)
                    busy[rank] += costs.of(action)
                    spans.append(Span(rank, action, start, free[rank]))
                position[rank] += 1
                moved = True
    waiting = [
        f"{row[position[r]]} on rank {r}" for r, row in order.items() if position[r] < len(row)
    ]
    if waiting:
        raise ValueError("the order never ends, these wait for ever: " + ", ".join(waiting))
    makespan = max(ends.values())
    bubbles = tuple(1.0 - busy[rank] / makespan for rank in sorted(order))
    return Timeline(tuple(spans), makespan, bubbles)
