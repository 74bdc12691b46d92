"""When each receive of a rank is alive, and how few slots hold them all. Arithmetic only.

A *receive* is one microbatch's activation or gradient that reaches a stage from another rank. A
*slot* is memory for one receive, used again for a later one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from pp_schedule.lowering import Instruction, Step, computations, leaves, lower
from pp_schedule.orders import Order

Direction = Literal["forward", "backward"]
Key = tuple[int, Direction, int]
"""A receive: stage index, direction and microbatch."""
Runtime = Literal["multi", "1f1b", "gpipe"]
"""Which of torch's loops runs an order (2.13 to 2.15).

- `multi`, `_PipelineScheduleRuntime`, that of most schedules and of files, posts a receive as soon
  as the peer may send.
- `1f1b`, that of `Schedule1F1B`, posts it when the action before the one that takes it has ended.
- `gpipe`, that of `ScheduleGPipe`, does so too, and holds a receive until it has posted the next.
"""


class Lifetime(NamedTuple):
    """The steps of a rank during which one receive must be intact."""

    stage_index: int
    """Global index of the receiving stage."""
    microbatch: int
    """Microbatch index, from 0."""
    direction: Direction
    """`forward` for an activation, `backward` for a gradient."""
    first: int
    """Position of the step with which the receive is posted."""
    last: int
    """Position of the last step that reads it."""


class Slots(NamedTuple):
    """Which receive uses which slot."""

    sizes: Sequence[int]
    """Size of each slot."""
    slot_of: Mapping[Key, int]
    """Slot number from 0 of each receive."""


def recv_lifetimes(order: Order, rank: int, runtime: Runtime = "multi") -> list[Lifetime]:
    """Return the lifetime of every receive of one rank, in the order of their posts.

    A receive is intact from its post to the end of the last action that needs it: an activation's
    backward (its weight half, where backwards are split; its forward, if there is none), likewise a
    gradient's. Between two stages of one rank nothing is received.

    Args:
        order: The order of all ranks.
        rank: The rank to look at.
        runtime: Which of torch's loops runs the order, and so when receives are posted.

    Raises:
        ValueError: If the ranks wait for each other for ever.
    """
    rows = computations(order)
    if runtime == "multi":
        forwards = Counter(step[0] for row in rows.values() for step in row if step[1] == "F")
        # What dialects differ in, waits for sends, changes no receive's place among the actions.
        rows = lower(rows, max(forwards.values(), default=0), "2.13", Instruction)
        return step_lifetimes(rows[rank])
    rank_of = {step[0]: r for r, row in rows.items() for step in row}
    steps = []
    for step in rows[rank]:
        stage, kind, microbatch, _ = step
        sender = stage - 1 if kind == "F" else stage + 1
        if rank_of.get(sender, rank) != rank:
            steps.append(Instruction(stage, "RECV_F" if kind == "F" else "RECV_B", microbatch))
        steps.append(step)
    lifetimes = step_lifetimes(steps)
    if runtime == "gpipe":
        for number, following in enumerate(lifetimes[1:]):
            held = max(lifetimes[number].last, following.first)
            lifetimes[number] = lifetimes[number]._replace(last=held)
    return lifetimes


def step_lifetimes(steps: Sequence[Step]) -> list[Lifetime]:
    """Return the lifetime of every receive of a rank from its program, torch's own or ours.

    Args:
        steps: Computations and the posts of receives; other steps only count as positions.
    """
    posted: dict[Key, int] = {}
    last: dict[Key, int] = {}
    for position, step in enumerate(steps):
        for stage, kind, microbatch, _ in leaves(step):
            if microbatch is None:
                continue
            activation: Key = (stage, "forward", microbatch)
            gradient: Key = (stage, "backward", microbatch)
            if kind in ("RECV_F", "RECV_B"):
                posted[activation if kind == "RECV_F" else gradient] = position
            elif kind in ("F", "B", "I", "W"):
                last[activation] = position
                if kind != "F":
                    last[gradient] = position
    return [
        Lifetime(stage, microbatch, direction, first, last[stage, direction, microbatch])
        for (stage, direction, microbatch), first in posted.items()
    ]


def max_overlap(
    lifetimes: Iterable[Lifetime], sizes: Mapping[tuple[int, Direction], int] | None = None
) -> int:
    """Return how much is alive at once, at most.

    Args:
        lifetimes: Lifetimes of one rank's receives.
        sizes: Size of a receive, by stage index and direction; all alike (1) if not given.
    """
    events = []
    for life in lifetimes:
        size = 1 if sizes is None else sizes[life.stage_index, life.direction]
        # At one position what begins comes before what ends: both are alive during that step.
        events += [(life.first, 0, size), (life.last, 1, -size)]
    alive = most = 0
    for _, _, change in sorted(events):
        alive += change
        most = max(most, alive)
    return most


def assign_slots(
    lifetimes: Iterable[Lifetime],
    slack: int = 2,
    sizes: Mapping[tuple[int, Direction], int] | None = None,
) -> Slots:
    """Give each receive a slot such that no two receives that are alive at once share one.

    Receives of equal size share slots, whatever their stage and direction: as many as are alive at
    once, which is the least possible, plus `slack`, and never more than there are receives. The
    slot that was released longest ago is used next, so each rests for `slack` further receives.

    Args:
        lifetimes: Lifetimes of one rank's receives.
        slack: Further slots, for each size.
        sizes: Size of a receive, by stage index and direction; all alike (1) if not given.

    Raises:
        ValueError: If `slack` is not an int of at least 0.
    """
    check_slack(slack)
    by_size: dict[int, list[Lifetime]] = {}
    for life in sorted(lifetimes, key=lambda life: life.first):
        size = 1 if sizes is None else sizes[life.stage_index, life.direction]
        by_size.setdefault(size, []).append(life)
    slot_sizes: list[int] = []
    slot_of = {}
    for size in sorted(by_size):
        lives = by_size[size]
        count = min(max_overlap(lives) + slack, len(lives))
        for life, slot in zip(lives, _color(lives, count), strict=True):
            slot_of[life.stage_index, life.direction, life.microbatch] = len(slot_sizes) + slot
        slot_sizes += [size] * count
    return Slots(slot_sizes, slot_of)


def _color(lives: Sequence[Lifetime], count: int) -> list[int]:
    """Return a slot below `count` for each lifetime; they come by position of their post."""
    free_since = [(-1, slot) for slot in range(count)]
    colors = []
    for life in lives:
        since, slot = heappop(free_since)
        assert since < life.first, "as many slots as lifetimes that overlap are enough"
        colors.append(slot)
        heappush(free_since, (life.last, slot))
    return colors


def check_slack(slack: int) -> None:
    """Raise ValueError if `slack` is not an int of at least 0."""
    if not isinstance(slack, int) or isinstance(slack, bool) or slack < 0:
        raise ValueError(
            f"slack={slack!r} must be an int of at least 0: it is the number of receive slots "
            "beyond those that are in use at once"
        )
