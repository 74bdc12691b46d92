"""How many layers each stage gets, so that the heaviest rank is as light as can be. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from pp_schedule.descent import TOLERANCE, descend
from pp_schedule.pair_balance import fit_pairs
from pp_schedule.placement import stage_ids_this_rank


def balance(
    layer_costs: Sequence[float],
    first_cost: float,
    last_cost: float,
    num_stages: int,
    pp_size: int | None = None,
    style: str = "loop",
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Return layers per stage, contiguous and in order, with the lightest heaviest rank there is.

    A stage may be empty where that is best: a last stage that has the head alone often is. Among
    equally good splits it takes the one with the smallest sum of squares of loads, then the one
    with more layers on the earlier stages.

    The result is exact (to one part in 10^9) with one stage per rank, with two, and with any
    number of stages if all layers cost the same. With three or more stages per rank and uneven
    layers it is the best that moving single layers from stage to stage comes to.

    Args:
        layer_costs: What each layer costs, in any unit.
        first_cost: What the first stage has besides layers, such as an embedding.
        last_cost: What the last stage has besides layers: norm, head and loss.
        num_stages: Stages of the whole pipeline.
        pp_size: Ranks, if they have several stages each; None is one stage per rank.
        style: Which stages share a rank, `"loop"` or `"v"`; see `stage_ids_this_rank`.
        slack: With several stages per rank, the share by which the heaviest rank may exceed the
            lightest possible for the sake of more even stages. Ranks can be equal while their
            stages are not, and ranks wait for the longest stage while the pipeline fills.

    Raises:
        ValueError: If a cost is negative or infinite, or the stages cannot be placed so.
    """
    _check(layer_costs, first_cost, last_cost, num_stages, slack)
    ranks = _ranks(num_stages, pp_size, style)
    model = _Model(layer_costs, first_cost, last_cost, ranks)
    counts = _one_per_rank(model, num_stages)
    if len(ranks) == num_stages:
        return counts
    starts = (counts, even_counts(len(layer_costs), num_stages))
    rest = (layer_costs, first_cost, last_cost, ranks)
    found = [descend(start, *rest) for start in starts]
    if num_stages == 2 * len(ranks):
        exact = _exact_pairs(model, min(found, key=model.rank_key), style)
        found.append(descend(exact, *rest))
    counts = min(found, key=model.rank_key)
    if not slack:
        return counts
    cap = max(model.rank_loads(counts)) * (1 + slack)

    def evenness(counts: Sequence[int]) -> tuple[float, float]:
        heaviest, _, squares = model.rank_key(counts)
        return max(heaviest, cap), squares

    return min((descend(start, *rest, cap) for start in found), key=evenness)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage by count alone; the first stages take the remainder, one each."""
    least, remainder = divmod(num_layers, num_stages)
    return tuple(least + (stage < remainder) for stage in range(num_stages))


def fold_counts(counts: Sequence[int]) -> str:
    """Return layers per stage as text, runs of equal ones shortened: `5x3,1`."""
    runs = ((count, len(list(run))) for count, run in groupby(counts))
    return ",".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)


@dataclass(frozen=True)
class Balance:
    """How good a split is, beside the one that counts layers alone."""

    layer_counts: tuple[int, ...]
    """Layers per stage."""
    rank_loads: tuple[float, ...]
    """What each rank has to do, in the unit of the costs."""
    even_counts: tuple[int, ...]
    """Layers per stage by count alone."""
    even_rank_loads: tuple[float, ...]
    """What each rank has to do then."""
    heaviest_part: tuple[str, float]
    """Name and cost of the largest thing that a split cannot divide."""

    @classmethod
    def of(
        cls,
        layer_counts: Sequence[int],
        layer_costs: Sequence[float],
        first_cost: float,
        last_cost: float,
        pp_size: int | None = None,
        style: str = "loop",
    ) -> "Balance":
        """Weigh a split; the arguments are those of `balance`."""
        ranks = _ranks(len(layer_counts), pp_size, style)
        model = _Model(layer_costs, first_cost, last_cost, ranks)
        even = even_counts(len(layer_costs), len(layer_counts))
        layers = ((f"layer {index}", cost) for index, cost in enumerate(layer_costs))
        parts = [
            ("the first stage's own part", first_cost),
            ("the last stage's own part", last_cost),
        ]
        return cls(
            tuple(layer_counts),
            tuple(model.rank_loads(layer_counts)),
            even,
            tuple(model.rank_loads(even)),
            max([*parts, *layers], key=lambda part: part[1]),
        )

    @property
    def heaviest(self) -> float:
        """Load of the heaviest rank; one of them is a step's slowest."""
        return max(self.rank_loads)

    @property
    def ideal(self) -> float:
        """Load of every rank if work could be cut anywhere."""
        return sum(self.rank_loads) / len(self.rank_loads)

    @property
    def ratio(self) -> float:
        """`heaviest` over `ideal`: 1 is perfect."""
        return self.heaviest / self.ideal if self.ideal else 1.0

    @property
    def even_ratio(self) -> float:
        """The same for the split by count alone."""
        return max(self.even_rank_loads) / self.ideal if self.ideal else 1.0

    def __str__(self) -> str:
        text = (
            f"layers {fold_counts(self.layer_counts)}: the heaviest rank has {self.ratio:.2f} x its ideal share "
            f"(spread evenly {self.even_ratio:.2f} x)"
        )
        name, cost = self.heaviest_part
        if cost > 1.05 * self.ideal:
            text += (
                f"; {name} alone is {cost / self.ideal:.2f} x, which no split can change: use "
                "fewer ranks, or divide it over ranks"
            )
        return text


class _Model:
    """Costs of a model, and which stages share a rank."""

    def __init__(
        self, layers: Sequence[float], first: float, last: float, ranks: Sequence[Sequence[int]]
    ) -> None:
        self.prefix = [0.0, *accumulate(layers)]
        self.first, self.last, self.ranks = first, last, ranks
        self.num_stages = sum(map(len, ranks))

    def stage_load(self, stage: int, low: int, high: int) -> float:
        """Load of a stage that has layers `low` to `high - 1`."""
        load = self.prefix[high] - self.prefix[low]
        if stage == 0:
            load += self.first
        return load + self.last if stage == self.num_stages - 1 else load

    def stage_loads(self, counts: Sequence[int]) -> list[float]:
        cuts = pairwise([0, *accumulate(counts)])
        return [self.stage_load(stage, low, high) for stage, (low, high) in enumerate(cuts)]

    def rank_loads(self, counts: Sequence[int]) -> list[float]:
        loads = self.stage_loads(counts)
        return [sum(loads[stage] for stage in stages) for stages in self.ranks]

    def rank_key(self, counts: Sequence[int]) -> tuple[float, float, float]:
        """What is to be made small, the first number first."""
        stages, ranks = self.stage_loads(counts), self.rank_loads(counts)
        return max(ranks), sum(x * x for x in ranks), sum(x * x for x in stages)


def _check(
    layer_costs: Sequence[float], first_cost: float, last_cost: float, num_stages: int, slack: float
) -> None:
    numbers = {f"layer_costs[{index}]": cost for index, cost in enumerate(layer_costs)}
    numbers |= {"first_cost": first_cost, "last_cost": last_cost, "slack": slack}
    problems = [
        f"{name} {number} must be a finite number, 0 or more"
        for name, number in numbers.items()
        if not 0 <= number < math.inf
    ]
    if num_stages < 1:
        problems.append(f"num_stages={num_stages} must be at least 1")
    if problems:
        raise ValueError("cannot balance: " + "; ".join(problems))


def _ranks(num_stages: int, pp_size: int | None, style: str) -> list[tuple[int, ...]]:
    size = num_stages if pp_size is None else pp_size
    if size == num_stages:
        style = "loop"
    return [stage_ids_this_rank(rank, size, num_stages, style) for rank in range(max(size, 1))]


def _one_per_rank(model: _Model, num_stages: int) -> tuple[int, ...]:
    """The split with the lightest heaviest stage; of those, the smallest sum of squares."""
    heaviest, _ = _best_suffixes(model, num_stages, math.inf, lambda load, rest: max(load, rest))
    cap = heaviest * (1 + TOLERANCE)
    _, counts = _best_suffixes(model, num_stages, cap, lambda load, rest: load * load + rest)
    return counts


def _best_suffixes(
    model: _Model, num_stages: int, cap: float, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Dynamic programming from the last stage to the first, no stage above `cap`.

    `join` makes, of a stage's load and the value of the stages after it, their value together; it
    grows with both. Returns the smallest value and its layers per stage.
    """
    num_layers = len(model.prefix) - 1
    last = num_stages - 1
    loads = [model.stage_load(last, low, num_layers) for low in range(num_layers + 1)]
    values = [join(load, 0.0) if load <= cap else math.inf for load in loads]
    choices: list[list[int]] = []
    for stage in range(last - 1, -1, -1):
        here, choice = [], []
        for low in range(num_layers + 1):
            best, best_high = math.inf, low
            for high in range(low, num_layers + 1):
                load = model.stage_load(stage, low, high)
                if load > cap or join(load, 0.0) > best * (1 + TOLERANCE):
                    break  # more layers are heavier still
                value = join(load, values[high])
                # On a tie the later cut, which gives this stage more layers.
                if value < best or value <= best * (1 + 1e-12):
                    best, best_high = min(best, value), high
            here.append(best)
            choice.append(best_high)
        values = here
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return values[0], tuple(high - low for low, high in pairwise([*cuts, num_layers]))


def _exact_pairs(model: _Model, counts: tuple[int, ...], style: str) -> tuple[int, ...]:
    """Improve a split of two stages per rank until nothing lighter can be."""
    heaviest = max(model.rank_loads(counts))
    total = model.prefix[-1] + model.first + model.last
    least = total / len(model.ranks)  # known to be too little, or the best there can be
    cap = heaviest * (1 - TOLERANCE)  # often the split is the best already: ask that first
    while heaviest > least * (1 + TOLERANCE):
        found = fit_pairs(model.prefix, model.first, model.last, len(model.ranks), style, cap)
        if found is None:
            least = cap
        else:
            counts, heaviest = found, max(model.rank_loads(found))
        cap = (least + heaviest) / 2
    return counts
