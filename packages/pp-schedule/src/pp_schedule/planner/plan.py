"""`plan`: which split, schedule and microbatch size to train with. No torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pp_schedule.balancing import even_counts
from pp_schedule.costs import Costs
from pp_schedule.gc_pause import gc_pause
from pp_schedule.orders import Order
from pp_schedule.planner.advice import advice, reason_against
from pp_schedule.planner.judge import Candidate, judge
from pp_schedule.planner.report import report
from pp_schedule.planner.search import OWN, Draft, Search
from pp_schedule.planner.splits import placements
from pp_schedule.schedule_csv import dump_csv

_GAIN = 0.03  # by which an order without a name must be faster than all that have one
_NEAR = 1.15  # microbatch sizes whose best named schedule is within this of the best are gone into
_JUDGED = 600_000  # how many actions are simulated in full


@dataclass(frozen=True)
class Plan:
    """What `plan` found."""

    best: Candidate
    """What to train with: the fastest that fits, or the nearest to fit if nothing does."""
    candidates: tuple[Candidate, ...] = field(repr=False)
    """The best of each kind: those that fit by their expected time, then the others."""
    baseline: Candidate = field(repr=False)
    """1F1B with as many layers on every rank."""
    advice: tuple[str, ...] = ()
    """What would help, where something would: sentences."""

    @property
    def order(self) -> Order:
        """The actions of every rank."""
        return self.best.order

    def why_not(self, candidate: Candidate) -> str:
        """Return why a candidate is not the best, in a few words."""
        return reason_against(candidate, self.best, _GAIN)

    def dump_csv(self, path: str | Path) -> None:
        """Write the order as a file for `pp_schedule_csv`; the same bytes on every rank."""
        dump_csv(self.order, path)

    def __str__(self) -> str:
        return report(self)


def plan(
    costs: Costs | Mapping[int, Costs],
    pp_size: int,
    num_microbatches: int | None = None,
    *,
    batch_size: int | None = None,
    memory_limit: float = math.inf,
    max_stages_per_rank: int = 2,
    jitter: float = 0.05,
    effort: float = 1.0,
) -> Plan:
    """Find the best split, schedule, stages per rank and microbatch size.

    Tried are all of torch's schedules, ZB-H1, ZB-H2, V-Half and V-Min, and orders made for these
    costs: with the even split, balanced ones, and ones that the memory allows. All are judged by
    `simulate`, and ranked by their time when the times of actions vary. A schedule with a name is
    preferred to an order without, unless that is more than 3 % faster. The same arguments give the
    same plan everywhere; nothing is sent.

    Args:
        costs: For one microbatch; with `batch_size` for a microbatch of one row, others being taken
            as multiples, or for each number of rows that may be used.
        pp_size: Number of ranks.
        num_microbatches: Microbatches per step, if `batch_size` is not given.
        batch_size: Rows per step; the number of rows per microbatch is then searched for too.
        memory_limit: Bytes that a rank has, in the sense of `Timeline.peak_memory`.
        max_stages_per_rank: Stages of a rank, at most.
        jitter: Spread of the times by which candidates are ranked; see `step_time`.
        effort: How much to try: 2 tries about twice as much as 1.

    Raises:
        ValueError: Naming everything about the arguments that is wrong.
    """
    trials = _trials(
        costs, pp_size, num_microbatches, batch_size, memory_limit, max_stages_per_rank, effort
    )
    with gc_pause():
        return _search(trials, pp_size, memory_limit, jitter)


def _search(trials: Mapping[int, Search], pp_size: int, memory_limit: float, jitter: float) -> Plan:
    # 1. What has a name, for every microbatch size.
    named = {size: search.named() for size, search in trials.items()}
    # 2. Orders of our own where they might be best.
    own = {size: trials[size].own(named[size]) for size in _promising_sizes(named, memory_limit)}
    # 3. The best of each kind in full.
    drafts = [(size, draft) for size in trials for draft in (*named[size], *own.get(size, ()))]
    judged = [
        judge(draft, trials[size].costs, size, memory_limit, jitter)
        for size, draft in _shortlist(drafts, memory_limit)
    ]
    # 4. The best of all.
    ranked = sorted(judged, key=lambda c: (c.excess_bytes, c.expected_time, c.step_time))
    best = _choose(ranked)
    search = trials[best.microbatch_size]
    even = next(
        d
        for d in named[best.microbatch_size]
        if d.schedule in ("1f1b", "gpipe")
        and d.layer_counts == even_counts(sum(d.layer_counts), pp_size)
    )
    baseline = judge(even, search.costs, best.microbatch_size, memory_limit, jitter)
    advised = advice(best, search.costs, pp_size)
    return Plan(best, tuple(_best_of_kinds(ranked)), baseline, tuple(advised))


def _trials(
    costs: Costs | Mapping[int, Costs],
    pp_size: int,
    num_microbatches: int | None,
    batch_size: int | None,
    memory_limit: float,
    max_stages_per_rank: int,
    effort: float,
) -> dict[int, Search]:
    """Return a search for each number of rows per microbatch."""
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (
            ("pp_size", pp_size),
            ("num_microbatches", num_microbatches),
            ("batch_size", batch_size),
            ("max_stages_per_rank", max_stages_per_rank),
        )
        if value is not None and value < 1
    ]
    problems += [
        f"{name}={value} must be above 0"
        for name, value in (("memory_limit", memory_limit), ("effort", effort))
        if not value > 0
    ]
    if (num_microbatches is None) == (batch_size is None):
        problems.append("give either num_microbatches or batch_size")
    if isinstance(costs, Mapping) and batch_size is None:
        problems.append("costs per microbatch size need batch_size")
    sizes: dict[int, Costs] = {}
    if not problems and batch_size is not None:
        sizes = _sizes(costs, batch_size)
        if not sizes:
            assert isinstance(costs, Mapping)
            problems.append(
                f"no microbatch size of costs ({', '.join(map(str, sorted(costs)))}) divides "
                f"batch_size={batch_size}"
            )
    if problems:
        raise ValueError("cannot plan: " + "; ".join(problems))
    if num_microbatches is not None:
        assert isinstance(costs, Costs)
        sizes = {1: costs}
    return {
        size: Search(
            of_size,
            pp_size,
            num_microbatches or (batch_size or 0) // size,
            memory_limit,
            placements(pp_size, len(of_size.layers), max_stages_per_rank),
            effort,
        )
        for size, of_size in sizes.items()
    }


def _sizes(costs: Costs | Mapping[int, Costs], batch_size: int) -> dict[int, Costs]:
    """Return the costs of each microbatch size that divides the batch."""
    if isinstance(costs, Mapping):
        return {size: costs[size] for size in sorted(costs) if batch_size % size == 0}
    return {
        size: costs.for_rows(size)
        for size in (2**power for power in range(batch_size.bit_length()))
        if batch_size % size == 0
    }


def _promising_sizes(named: Mapping[int, Iterable[Draft]], memory_limit: float) -> list[int]:
    """Return the microbatch sizes for which a named schedule comes near to the best."""
    times = {
        size: min((d.step_time for d in drafts if d.needed_bytes <= memory_limit), default=math.inf)
        for size, drafts in named.items()
    }
    fastest = min(times.values())
    if math.isinf(fastest):  # nothing fits: the smallest microbatches need least
        return [min(named)]
    return [size for size, time in times.items() if time <= _NEAR * fastest]


def _shortlist(drafts: list[tuple[int, Draft]], memory_limit: float) -> list[tuple[int, Draft]]:
    """Return the best of each kind, the best first, as many as are worth a full simulation."""

    def key(entry: tuple[int, Draft]) -> tuple[float, float]:
        draft = entry[1]
        return max(0.0, draft.needed_bytes - memory_limit), draft.step_time

    kinds: dict[tuple[object, ...], tuple[int, Draft]] = {}
    for entry in sorted(drafts, key=key):
        size, draft = entry
        kinds.setdefault((size, draft.schedule, draft.placement), entry)
    ranked = list(kinds.values())
    # Receive buffers may take the best order beyond the limit: have others of its kind at hand.
    spare = [entry for entry in sorted(drafts, key=key) if entry[1].schedule == OWN][:3]
    first_named = [entry for entry in ranked if entry[1].schedule != OWN][:3]
    wanted = {id(draft): (size, draft) for size, draft in (*first_named, *spare, *ranked)}
    shortlist: list[tuple[int, Draft]] = []
    actions = 0
    for size, draft in wanted.values():
        actions += sum(map(len, draft.order.values()))
        if len(shortlist) < 4 or actions <= _JUDGED:
            shortlist.append((size, draft))
    return shortlist


def _best_of_kinds(ranked: list[Candidate]) -> list[Candidate]:
    kinds: dict[tuple[object, ...], Candidate] = {}
    for c in ranked:
        kinds.setdefault((c.microbatch_size, c.schedule, c.stages_per_rank, c.style), c)
    return list(kinds.values())


def _choose(ranked: list[Candidate]) -> Candidate:
    """Return the first; if it has no name, the first that has one unless that is much slower."""
    best = ranked[0]
    named = next((c for c in ranked if c.is_named and c.fits), None)
    if best.fits and named and named.expected_time * (1 - _GAIN) <= best.expected_time:
        return named
    return best
