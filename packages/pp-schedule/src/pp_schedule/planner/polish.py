"""Small changes to an order that make it faster. No torch."""

from collections.abc import Mapping, Sequence
from random import Random

from pp_schedule.orders import Action, Order
from pp_schedule.simulator import step_time
from pp_schedule.stage_costs import StageCosts

_REACH = 4  # how far an action is moved at most


def polish(
    order: Order, costs: StageCosts, limits: Sequence[float], num_tries: int, seed: int = 0
) -> Order:
    """Move single actions within their ranks as long as that makes the step no longer.

    Actions of one kind and stage stay in order. The same arguments give the same result anywhere.

    Args:
        order: A valid order.
        costs: Times and bytes per stage.
        limits: Bytes of activations per rank; a rank that has more already may keep what it has.
        num_tries: How many changes to try.
        seed: Which changes to try.
    """
    rows = {rank: [a for a in row if a is not None] for rank, row in order.items()}
    num_stages = 1 + max(action.stage_index for row in rows.values() for action in row)
    memory = _Memory(costs, num_stages)
    caps = [max(limit, memory.peak(rows[rank])) for rank, limit in enumerate(limits)]
    random = Random(seed)
    shortest = step_time(rows, costs)
    for _ in range(num_tries):
        rank = random.randrange(len(rows))
        row = _moved(rows[rank], random)
        if row is None or memory.peak(row) > caps[rank] * (1 + 1e-9):
            continue
        changed = {**rows, rank: row}
        try:
            time = step_time(changed, costs)
        except ValueError:  # ranks would wait for each other for ever
            continue
        if time <= shortest:
            rows, shortest = changed, time
    return rows


def activation_peaks(order: Order, costs: StageCosts) -> list[float]:
    """Return the most bytes of activations that each rank holds; receive buffers are not counted."""
    rows: Mapping[int, list[Action]] = {
        rank: [a for a in row if a is not None] for rank, row in order.items()
    }
    num_stages = 1 + max(action.stage_index for row in rows.values() for action in row)
    memory = _Memory(costs, num_stages)
    return [memory.peak(rows[rank]) for rank in sorted(rows)]


class _Memory:
    """How many bytes each action adds or frees; as `pp_schedule.memory` counts them."""

    def __init__(self, costs: StageCosts, num_stages: int) -> None:
        whole = costs.per_stage("activation_bytes", num_stages)
        share = costs.per_stage("kept_for_weight", num_stages)
        kept = [part * size for part, size in zip(share, whole, strict=True)]
        kept[0] = whole[0]
        self.change = {
            "F": whole,
            "B": [-size for size in whole],
            "I": [after - size for after, size in zip(kept, whole, strict=True)],
            "W": [-size for size in kept],
        }

    def peak(self, row: Sequence[Action]) -> float:
        held = most = 0.0
        change = self.change
        for stage, kind, _ in row:
            held += change[kind][stage]
            if held > most:
                most = held
        return most


def _moved(row: Sequence[Action], random: Random) -> list[Action] | None:
    """Return the row with one action elsewhere; None if that would pass one of its own kind."""
    start = random.randrange(len(row))
    end = start + random.choice((-1, 1)) * random.randint(1, _REACH)
    if not 0 <= end < len(row):
        return None
    stage, kind, _ = action = row[start]
    passed = row[start + 1 : end + 1] if end > start else row[end:start]
    if any(other[0] == stage and other[1] == kind for other in passed):
        return None
    changed = list(row)
    del changed[start]
    changed.insert(end, action)
    return changed
