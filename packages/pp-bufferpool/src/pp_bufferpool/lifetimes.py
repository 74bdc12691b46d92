"""When each receive buffer of a rank is in use, and how few slots hold them all. Arithmetic only.

A *receive* is one microbatch's activation or gradient that reaches a stage from another rank. A
*slot* is memory for one receive, used again for a later one.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pp_schedule.orders import Action, Order

Direction = Literal["forward", "backward"]


class Lifetime(NamedTuple):
    """The actions of a rank during which one receive's buffer must be intact."""

    stage_index: int
    """Global index of the receiving stage."""
    microbatch: int
    """Microbatch index, from 0."""
    direction: Direction
    """`forward` for an activation, `backward` for a gradient."""
    first: int
    """Position of the action that takes the receive; it is posted when the action before ends."""
    last: int
    """Position of the last action that reads the buffer."""


class Slots(NamedTuple):
    """How many slots each stage and direction has, and which receive uses which."""

    counts: Mapping[tuple[int, Direction], int]
    """Number of slots, by stage index and direction."""
    slot_of: Mapping[tuple[int, Direction, int], int]
    """Slot number from 0, by stage index, direction and microbatch."""


def recv_lifetimes(order: Order, rank: int, copied: bool = False) -> list[Lifetime]:
    """Return the lifetime of every receive of one rank.

    Receives are taken to be posted when the action before the one that needs them ends, as torch's
    single-stage schedules do (`Schedule1F1B._step_microbatches`, 2.13 and 2.15). Between two stages
    of one rank nothing is received.

    Args:
        order: The order of all ranks.
        rank: The rank to look at.
        copied: Whether an action copies its receive before it computes. If not, the buffer itself
            is the stage's input or gradient: an activation is in use until its backward ends (its
            weight half, where backwards are split), a gradient likewise.
    """
    rank_of = {a.stage_index: r for r, actions in order.items() for a in actions if a is not None}
    position = {action: i for i, action in enumerate(order[rank]) if action is not None}
    lifetimes = []
    for action, first in position.items():
        stage, kind, microbatch = action
        if kind == "W":
            continue
        direction: Direction = "forward" if kind == "F" else "backward"
        sender = stage - 1 if kind == "F" else stage + 1
        if rank_of.get(sender, rank) == rank:
            continue
        readers = [first]
        if not copied:
            later = [Action(stage, k, microbatch) for k in "BIW"]
            readers += [position[reader] for reader in later if reader in position]
        lifetimes.append(Lifetime(stage, microbatch, direction, first, max(readers)))
    return lifetimes


def max_overlap(lifetimes: Iterable[Lifetime]) -> int:
    """Return how many lifetimes are alive at once, at most."""
    # At one position what begins comes before what ends: both are alive during that action.
    events = sorted(
        event for life in lifetimes for event in ((life.first, 0, 1), (life.last, 1, -1))
    )
    alive = most = 0
    for _, _, change in events:
        alive += change
        most = max(most, alive)
    return most


def assign_slots(lifetimes: Iterable[Lifetime], slack: int = 2) -> Slots:
    """Give each receive a slot such that no two receives that are alive at once share one.

    Each stage and direction has its own slots: as many as it has receives alive at once, which is
    the least possible, plus `slack`, and never more than it has receives. The slot that was
    released longest ago is used next, so each rests for `slack` further receives.

    Args:
        lifetimes: Lifetimes of one rank's receives.
        slack: Further slots.

    Raises:
        ValueError: If `slack` is not an int of at least 0.
    """
    check_slack(slack)
    by_owner: dict[tuple[int, Direction], list[Lifetime]] = {}
    for life in sorted(lifetimes, key=lambda life: life.first):
        by_owner.setdefault((life.stage_index, life.direction), []).append(life)
    counts = {}
    slot_of = {}
    for (stage, direction), lives in by_owner.items():
        counts[stage, direction] = count = min(max_overlap(lives) + slack, len(lives))
        free = deque(range(count))
        in_use: list[tuple[int, int]] = []  # last position, slot
        for life in lives:
            ended = sorted(use for use in in_use if use[0] < life.first)
            free.extend(slot for _, slot in ended)
            in_use = [use for use in in_use if use[0] >= life.first]
            slot = free.popleft()
            in_use.append((life.last, slot))
            slot_of[stage, direction, life.microbatch] = slot
    return Slots(counts, slot_of)


def check_slack(slack: int) -> None:
    """Raise ValueError if `slack` is not an int of at least 0."""
    if not isinstance(slack, int) or isinstance(slack, bool) or slack < 0:
        raise ValueError(
            f"slack={slack!r} must be an int of at least 0: it is the number of receive slots "
            "beyond those that are in use at once"
        )
