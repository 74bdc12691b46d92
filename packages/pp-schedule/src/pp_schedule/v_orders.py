"""V-Half and V-Min: two stages per rank, placed as a V, in a fraction of 1F1B's memory. No torch.

Both repeat the course of one microbatch every six units of time, the time of its six actions on a
rank (a forward and both halves of a backward, on two stages). The course is given by the time from
stage to stage, which sets the memory, since a rank holds a microbatch from its forward to its
backward. See Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product

from pp_schedule.orders import Action, Order
from pp_schedule.simulator import simulate
from pp_schedule.stage_costs import StageCosts
from pp_schedule.zero_bubble_orders import Skeleton, fill_weights, held_by

_REPEAT = 6
_Triple = tuple[int, int, int]
_Offsets = tuple[int, int, int, int]  # forwards down the V, forwards up, backwards down, up


def v_half_order(pp_size: int, num_microbatches: int) -> Order:
    """V-Half: half of 1F1B's activations and about half of its idle time.

    A rank holds at most pp_size + 2 microbatches, of its two stages together.
    """
    return _v_order(pp_size, num_microbatches, (2, 1, 2, 1), _v_half_holds)


def v_min_order(pp_size: int, num_microbatches: int) -> Order:
    """V-Min: a third of 1F1B's activations and about two thirds of its idle time.

    A rank holds at most 2 ((pp_size + 4) // 3) microbatches, of its two stages together. Ranks
    wait for each other at every microbatch, so it loses much where times are uneven.
    """
    return _v_order(pp_size, num_microbatches, (1, 1, 1, 1), _v_min_holds)


def _v_half_holds(pp_size: int) -> int:
    return pp_size + 2


def _v_min_holds(pp_size: int) -> int:
    return 2 * ((pp_size + 4) // 3)


def _v_order(
    pp_size: int, num_microbatches: int, offsets: _Offsets, holds: Callable[[int], int]
) -> Order:
    # Which actions meet depends on pp_size modulo 6 alone: what is best for few ranks is for many.
    few = pp_size if pp_size < 2 * _REPEAT else _REPEAT + pp_size % _REPEAT
    skeleton = _skeleton(pp_size, num_microbatches, offsets, _best_gaps(few, offsets, holds))
    return fill_weights(skeleton, holds(pp_size))


@cache
def _best_gaps(pp_size: int, offsets: _Offsets, holds: Callable[[int], int]) -> _Triple:
    """How long a microbatch waits at the tip, the end and the tip of the V again.

    Of the waits with which no rank has two actions at once, within the memory, those of the
    shortest step, where halves are not equal and messages take time.
    """
    uneven = StageCosts(1.0, 1.0, 0.6, latency=0.05)

    def length(gaps: _Triple) -> float:
        skeleton = _skeleton(pp_size, 2 * pp_size, offsets, gaps)
        return simulate(fill_weights(skeleton, holds(pp_size)), uneven).makespan

    def fits(gaps: _Triple) -> bool:
        if _collides(pp_size, offsets, gaps):
            return False
        skeleton = _skeleton(pp_size, 2 * pp_size, offsets, gaps)
        return all(held_by(row) <= holds(pp_size) for row in skeleton.values())

    return min(filter(fits, _triples(5)), key=length)


def _triples(largest: int) -> Iterator[_Triple]:
    yield from product(range(1, largest + 1), repeat=3)


def _times(pp_size: int, rank: int, offsets: _Offsets, gaps: _Triple) -> _Offsets:
    """When a rank runs its first forward, second forward, first backward and second backward."""
    down, up, back_down, back_up = offsets
    last = pp_size - 1
    tip = down * last + gaps[0]
    end = tip + up * last + gaps[1]
    back = end + back_down * last + gaps[2]
    return (
        down * rank,
        tip + up * (last - rank),
        end + back_down * rank,
        back + back_up * (last - rank),
    )


def _collides(pp_size: int, offsets: _Offsets, gaps: _Triple) -> bool:
    """Whether some rank would have two actions at once, of whatever microbatches."""
    return any(
        (one - other) % _REPEAT == 0
        for rank in range(pp_size)
        for one, other in combinations(_times(pp_size, rank, offsets, gaps), 2)
    )


def _skeleton(pp_size: int, num_microbatches: int, offsets: _Offsets, gaps: _Triple) -> Skeleton:
    skeleton = {}
    for rank in range(pp_size):
        low, high = rank, 2 * pp_size - 1 - rank
        course = zip(
            _times(pp_size, rank, offsets, gaps),
            ((low, "F"), (high, "F"), (high, "I"), (low, "I")),
            strict=True,
        )
        timed = [
            (start + _REPEAT * m, Action(stage, kind, m))
            for start, (stage, kind) in course
            for m in range(num_microbatches)
        ]
        skeleton[rank] = [action for _, action in sorted(timed)]
    return skeleton
