"""Drafts of a plan: a split and an order together, weighed quickly. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from pp_schedule.balancing import even_counts
from pp_schedule.costs import Costs
from pp_schedule.named_orders import OWN_ORDERS, named_order
from pp_schedule.names import SCHEDULE_NAMES, ScheduleSpec, resolve_schedule
from pp_schedule.orders import Order
from pp_schedule.planner.bound import lower_bound
from pp_schedule.planner.list_schedule import Preference, Rules, list_schedule, refit
from pp_schedule.planner.polish import polish
from pp_schedule.planner.splits import Placement, lighten, memory_needs, splits
from pp_schedule.simulator import step_time
from pp_schedule.stage_costs import StageCosts

OWN = "own"
"""What an order is called that no name stands for."""

_PREFERENCES: tuple[Preference, ...] = ("other", "forward", "backward")
_RULES = tuple(
    Rules(prefer, deep_first, patience)
    for deep_first, prefer, patience in product((True, False), _PREFERENCES, (0.0, 1.0))
)
# How much is looked at, in actions that are simulated or scheduled; about 2 and 10 microseconds.
_LIGHTEN, _SCHEDULE, _POLISH, _POLISH_BEST = 400_000, 1_500_000, 600_000, 4_000_000
_POLISHED = 5
_LEAST_TRIES, _MOST_TRIES = 100, 16_000


@dataclass(frozen=True)
class Draft:
    """A split and an order, and what matters most about them."""

    schedule: str
    """The name of the order, or `OWN`."""
    placement: Placement
    layer_counts: tuple[int, ...]
    order: Order = field(repr=False)
    step_time: float
    needed_bytes: float
    """Of the rank that needs most, without receive buffers that come and go."""


@dataclass
class Search:
    """All that is tried for one microbatch size."""

    costs: Costs
    """For one microbatch."""
    pp_size: int
    num_microbatches: int
    memory_limit: float
    """Bytes per rank."""
    placements: Sequence[Placement]
    """The placements that are tried."""
    effort: float
    """1 by default; half of it looks at half as much."""

    def named(self) -> list[Draft]:
        """Every order that has a name with every split, and with splits that its memory allows."""
        drafts: list[Draft] = []
        for placement in self.placements:
            bounds = {
                counts: self.bound(placement, counts) for counts in splits(self.costs, placement)
            }
            for schedule, order in self._orders(placement):
                found: list[Draft] = []
                for counts in sorted(bounds, key=lambda counts: bounds[counts]):
                    is_even = counts == even_counts(sum(counts), len(counts))
                    if bounds[counts] < _best_time(found, self.memory_limit) or is_even:
                        found.append(self._draft(schedule, placement, counts, order))
                drafts += found
                over = [draft for draft in found if draft.needed_bytes > self.memory_limit]
                fastest = min(over, key=lambda draft: draft.step_time, default=None)
                if fastest and fastest.step_time < _best_time(drafts, self.memory_limit):
                    drafts += self._lightened(fastest)
        return drafts

    def own(self, named: list[Draft]) -> list[Draft]:
        """Orders made for the splits of `named`, and the best of all improved."""
        made: list[Draft] = []
        budget = int(_SCHEDULE * self.effort)
        for placement, counts in self._promising(named):
            num_actions = 3 * placement.num_stages * self.num_microbatches
            # Large orders are tried in fewer ways, so that several splits have their turn.
            rules = _RULES[: max(3, budget // (4 * num_actions))]
            best = self._made_for(placement, counts, named, rules)
            made += [best] if best else []
            budget -= len(rules) * num_actions
            if budget <= 0:
                break
        polished = [
            self._polished(draft, _POLISH, seed=0)
            for draft in self._worth_polishing([*made, *named])
        ]
        for draft in sorted(polished, key=lambda draft: draft.step_time)[:1]:
            polished.append(self._polished(draft, _POLISH_BEST, seed=1))
        return made + polished

    def bound(self, placement: Placement, counts: tuple[int, ...]) -> float:
        """Return what no order of a split can beat."""
        return lower_bound(
            placement.stage_ids, self.costs.for_stages(counts), self.num_microbatches
        )

    def _orders(self, placement: Placement) -> Iterator[tuple[str, Order]]:
        for spec in _specs():
            if _runs(spec, placement, self.num_microbatches):
                yield (
                    spec.name,
                    named_order(spec, self.pp_size, placement.num_stages, self.num_microbatches),
                )
        for name, (per_rank, make) in OWN_ORDERS.items():
            style = "loop" if per_rank == 1 else "v"
            if (placement.stages_per_rank, placement.style) == (per_rank, style):
                yield name, make(self.pp_size, self.num_microbatches)

    def _lightened(self, draft: Draft) -> list[Draft]:
        """The same order with splits that fit, exactly and with room for messages that wait.

        What those take is not known before the clock runs.
        """
        counts, found = draft.layer_counts, []
        waiting = 2 * draft.placement.stages_per_rank * self.costs.boundary_bytes
        for limit in (self.memory_limit, self.memory_limit - waiting):
            tries = self._tries(_LIGHTEN, draft.order)
            counts = lighten(counts, self.costs, draft.placement, draft.order, limit, tries)
            found.append(self._draft(draft.schedule, draft.placement, counts, draft.order))
        return found

    def _draft(
        self, schedule: str, placement: Placement, counts: tuple[int, ...], order: Order
    ) -> Draft:
        stage_costs = self.costs.for_stages(counts)
        return Draft(
            schedule,
            placement,
            counts,
            order,
            step_time(order, stage_costs),
            max(memory_needs(order, stage_costs, placement.stage_ids)),
        )

    def _promising(self, named: list[Draft]) -> list[tuple[Placement, tuple[int, ...]]]:
        """The splits that could beat the best order so far, the most promising first."""
        best = _best_time(named, self.memory_limit)
        bounds = {
            (d.placement, d.layer_counts): self.bound(d.placement, d.layer_counts) for d in named
        }
        near = [split for split in bounds if bounds[split] < best]
        return sorted(near, key=lambda split: bounds[split])

    def _made_for(
        self,
        placement: Placement,
        counts: tuple[int, ...],
        named: list[Draft],
        rules: Sequence[Rules],
    ) -> Draft | None:
        """Return the best order made for a split."""
        stage_costs = self.costs.for_stages(counts)
        room = self._room(placement, stage_costs)
        orders = [
            list_schedule(placement.stage_ids, stage_costs, self.num_microbatches, room, rule)
            for rule in rules
        ]
        templates = {d.schedule: d.order for d in named if d.placement == placement}
        orders += [
            refit(order, stage_costs, room) for order in list(templates.values())[: len(rules)]
        ]
        drafts = [self._draft(OWN, placement, counts, order) for order in orders if order]
        return min(drafts, key=lambda draft: draft.step_time, default=None)

    def _worth_polishing(self, drafts: list[Draft]) -> list[Draft]:
        """The best of each placement, then the best of all."""
        fitting = [draft for draft in drafts if draft.needed_bytes <= self.memory_limit]
        fitting.sort(key=lambda draft: draft.step_time)
        first = {draft.placement: draft for draft in reversed(fitting)}
        ordered = [*sorted(first.values(), key=lambda draft: draft.step_time), *fitting]
        return list({id(draft): draft for draft in ordered}.values())[:_POLISHED]

    def _polished(self, draft: Draft, budget: int, seed: int) -> Draft:
        tries = self._tries(budget, draft.order)
        if tries < _LEAST_TRIES:
            return draft
        stage_costs = self.costs.for_stages(draft.layer_counts)
        room = self._room(draft.placement, stage_costs)
        order = polish(draft.order, stage_costs, room, tries, seed)
        return self._draft(OWN, draft.placement, draft.layer_counts, order)

    def _room(self, placement: Placement, costs: StageCosts) -> list[float]:
        """Bytes for activations on each rank, two receives of each stage set aside."""
        fixed = costs.per_stage("parameter_bytes", placement.num_stages)
        if costs.buffer_bytes is None:
            receives = [
                2 * size for size in costs.per_stage("boundary_bytes", placement.num_stages)
            ]
        else:
            receives = costs.per_stage("buffer_bytes", placement.num_stages)
        return [
            self.memory_limit - sum(fixed[stage] + receives[stage] for stage in stages)
            for _, stages in sorted(placement.stage_ids.items())
        ]

    def _tries(self, budget: int, order: Order) -> int:
        return min(_MOST_TRIES, int(budget * self.effort / sum(map(len, order.values()))))


def _specs() -> list[ScheduleSpec]:
    return list(dict.fromkeys(resolve_schedule(n) for n in SCHEDULE_NAMES if n != "auto"))


def _runs(spec: ScheduleSpec, placement: Placement, num_microbatches: int) -> bool:
    if placement.stages_per_rank == 1 and spec.stages_per_rank is None and not spec.splits_backward:
        return False  # with one stage per rank these are 1F1B and GPipe
    return spec.style == placement.style and not spec.check(
        placement.pp_size, placement.num_stages, num_microbatches
    )


def _best_time(drafts: list[Draft], memory_limit: float) -> float:
    fitting = (d.step_time for d in drafts if d.needed_bytes <= memory_limit)
    return min(fitting, default=float("inf"))
