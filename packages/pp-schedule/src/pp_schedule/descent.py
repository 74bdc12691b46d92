"""Improve a split by moving single layers, as long as that helps. No torch."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

TOLERANCE = 1e-9  # costs nearer to each other than this, relatively, are taken as equal
Key = tuple[float, float, float]
"""What is to be small, the first number first: the heaviest rank, or a cap that it need not go
below; the sum of squares of the ranks' loads; that of the stages'."""


def descend(
    counts: tuple[int, ...],
    layers: Sequence[float],
    first: float,
    last: float,
    ranks: Sequence[Sequence[int]],
    cap: float | None = None,
) -> tuple[int, ...]:
    """Move one layer at a time from a stage to another, the best move first, while it helps.

    Args:
        counts: Layers per stage to begin with.
        layers: Cost of each layer.
        first: What the first stage has besides layers.
        last: What the last stage has besides layers.
        ranks: The stages of every rank.
        cap: Do not make the heaviest rank lighter than this, but the stages even; None makes the
            heaviest rank as light as can be, then the ranks even, then the stages.
    """
    while True:
        split = _Split(counts, layers, first, last, ranks, cap)
        moves = [
            (split.key_after(source, target), source, target) for source, target in split.moves()
        ]
        if not moves:
            return counts
        key, source, target = min(moves)
        if not better(key, split.key):
            return counts
        moved = list(counts)
        moved[source] -= 1
        moved[target] += 1
        counts = tuple(moved)


def better(key: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `key` comes first, its numbers compared one after the other with a tolerance."""
    for new, old in zip(key, other, strict=True):
        if abs(new - old) > TOLERANCE * max(new, old):
            return new < old
    return False


class _Split:
    """Loads of a split, and what they become when one layer moves.

    A layer that goes from a stage to another pushes one layer over each cut between them. Stages
    between change only where the layer that comes costs something else than the one that goes, so
    that a move of equal layers is weighed in no time.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        layers: Sequence[float],
        first: float,
        last: float,
        ranks: Sequence[Sequence[int]],
        cap: float | None,
    ) -> None:
        self.counts, self.layers, self.cap = counts, layers, cap
        self.cuts = [0, *accumulate(counts)]
        prefix = [0.0, *accumulate(layers)]
        self.loads = [
            prefix[high] - prefix[low] for low, high in zip(self.cuts, self.cuts[1:], strict=False)
        ]
        self.loads[0] += first
        self.loads[-1] += last
        self.rank_of = {stage: rank for rank, stages in enumerate(ranks) for stage in stages}
        self.rank_loads = [sum(self.loads[stage] for stage in stages) for stages in ranks]
        self.heaviest_first = sorted(
            range(len(ranks)), key=lambda rank: self.rank_loads[rank], reverse=True
        )
        self.rank_squares = sum(load * load for load in self.rank_loads)
        self.stage_squares = sum(load * load for load in self.loads)
        # What a stage gains when all its layers shift by one, down (from lower stages) or up.
        self.down = [self._cost(low - 1) - self._cost(high - 1) for low, high in self._spans()]
        self.up = [self._cost(high) - self._cost(low) for low, high in self._spans()]
        self.changed_down = [stage for stage, change in enumerate(self.down) if change]
        self.changed_up = [stage for stage, change in enumerate(self.up) if change]

    def moves(self) -> Iterator[tuple[int, int]]:
        """Every move: from which stage and to which."""
        for source, count in enumerate(self.counts):
            for target in range(len(self.counts)) if count else ():
                if source != target:
                    yield source, target

    @property
    def key(self) -> Key:
        """The key of the split itself."""
        return self._key(max(self.rank_loads), self.rank_squares, self.stage_squares)

    def key_after(self, source: int, target: int) -> Key:
        """The key after a layer has moved."""
        changes = self._changes(source, target)
        stage_squares = self.stage_squares
        of_rank: dict[int, float] = {}
        for stage, change in changes:
            load = self.loads[stage]
            stage_squares += change * (2 * load + change)
            rank = self.rank_of[stage]
            of_rank[rank] = of_rank.get(rank, 0.0) + change
        rank_squares, heaviest = self.rank_squares, 0.0
        for rank, change in of_rank.items():
            load = self.rank_loads[rank]
            rank_squares += change * (2 * load + change)
            heaviest = max(heaviest, load + change)
        for rank in self.heaviest_first:
            if rank not in of_rank:
                heaviest = max(heaviest, self.rank_loads[rank])
                break
        return self._key(heaviest, rank_squares, stage_squares)

    def _key(self, heaviest: float, rank_squares: float, stage_squares: float) -> Key:
        if self.cap is None:
            return heaviest, rank_squares, stage_squares
        return max(heaviest, self.cap), stage_squares, 0.0

    def _changes(self, source: int, target: int) -> list[tuple[int, float]]:
        """How much the load of each stage changes that does."""
        if source < target:
            gone, come = self._cost(self.cuts[source + 1] - 1), self._cost(self.cuts[target] - 1)
            stages, change = self.changed_down, self.down
        else:
            gone, come = self._cost(self.cuts[source]), self._cost(self.cuts[target + 1])
            stages, change = self.changed_up, self.up
        low, high = min(source, target), max(source, target)
        between = stages[bisect_right(stages, low) : bisect_left(stages, high)]
        return [(source, -gone), (target, come), *((stage, change[stage]) for stage in between)]

    def _spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.cuts, self.cuts[1:], strict=False)

    def _cost(self, layer: int) -> float:
        """Cost of a layer; beyond the ends there is none, and none that ever moves."""
        return self.layers[layer] if 0 <= layer < len(self.layers) else math.nan
