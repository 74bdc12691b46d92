"""Whether a model fits ranks of two stages each under a cap, looped or as a V. No torch."""

from bisect import bisect_right
from collections.abc import Sequence

_State = tuple[int, int]


def fit_pairs(
    prefix: Sequence[float], first: float, last: float, pp_size: int, style: str, cap: float
) -> tuple[int, ...] | None:
    """Return layers per stage such that no rank exceeds `cap`, or None if there are none.

    The first half of the layers lies on the ranks' first stages, the second on their second ones;
    every place of the middle is tried. A rank takes layers from the front of both halves (in a V,
    the second half runs over the ranks backwards, so it is read from its end).

    Args:
        prefix: Cost of the layers before each layer, and of all of them.
        first: What the first stage has besides layers.
        last: What the last stage has besides layers.
        pp_size: Ranks.
        style: `"loop"` or `"v"`.
        cap: The most that a rank may have.
    """
    total = prefix[-1]
    extra = [0.0] * pp_size
    extra[0] += first
    extra[-1 if style == "loop" else 0] += last
    num_layers = len(prefix) - 1
    # Middles near half the work first: what fits is mostly there.
    for middle in sorted(range(num_layers + 1), key=lambda k: abs(prefix[k] - total / 2)):
        low = list(prefix[: middle + 1])
        high = [x - prefix[middle] for x in prefix[middle:]]
        if style == "v":
            high = [high[-1] - x for x in reversed(high)]
        found = _fill(low, high, extra, cap)
        if found is not None:
            firsts, seconds = found
            return (*firsts, *(seconds if style == "loop" else reversed(seconds)))
    return None


def _fill(
    low: Sequence[float], high: Sequence[float], extra: Sequence[float], cap: float
) -> tuple[list[int], list[int]] | None:
    """Return layers per rank of two lists, each given by its prefix sums, or None.

    Having taken more of the second list is never worse, so for each number of layers taken of the
    first only the most of the second is kept.
    """
    end = (len(low) - 1, len(high) - 1)
    whole = low[-1] + high[-1]
    room_after = [sum(cap - x for x in extra[rank + 1 :]) for rank in range(len(extra))]
    steps: list[dict[int, tuple[int, _State]]] = []
    reached: dict[int, int] = {0: 0}
    for rank, own in enumerate(extra):
        room = cap - own
        if room < 0:
            return None
        step: dict[int, tuple[int, _State]] = {}
        for a, b in reached.items():
            furthest = bisect_right(low, low[a] + room) - 1
            for to_a in range(a, furthest + 1):
                to_b = bisect_right(high, high[b] + room - (low[to_a] - low[a])) - 1
                # What is left must fit the ranks that are left.
                if whole - low[to_a] - high[to_b] > room_after[rank] * (1 + 1e-12):
                    continue
                if to_a not in step or to_b > step[to_a][0]:
                    step[to_a] = (to_b, (a, b))
        steps.append(step)
        reached = {a: b for a, (b, _) in step.items()}
    if reached.get(end[0]) != end[1]:
        return None
    firsts, seconds = [], []
    a, b = end
    for step in reversed(steps):
        before = step[a][1]
        firsts.append(a - before[0])
        seconds.append(b - before[1])
        a, b = before
    return firsts[::-1], seconds[::-1]
