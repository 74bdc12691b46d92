"""Orders made for given costs: a clock runs, and each rank takes what is best for it to do next.

No torch.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pp_schedule.orders import Action, Order
from pp_schedule.stage_costs import StageCosts

Preference = Literal["forward", "backward", "other"]
_NEVER = float("inf")


@dataclass(frozen=True)
class Rules:
    """How ranks choose."""

    prefer: Preference = "other"
    """What goes first where both could run: one of them, or the other than came last."""
    deep_first: bool = True
    """Of two forwards that could run, take that of the later stage; else that of the earlier."""
    patience: float = 0.0
    """A weight half fills a wait that lasts at least this share of its time."""
    split: bool = True
    """Whether backwards are split. Stage 0's never is: its input half would be no work."""


def list_schedule(
    stage_ids: Mapping[int, Sequence[int]],
    costs: StageCosts,
    num_microbatches: int,
    limits: Sequence[float],
    rules: Rules,
) -> Order | None:
    """Return an order in which no rank holds more activations than its limit, if there is one.

    A microbatch enters a rank's first stage only when the activations of all the rank's stages for
    it have room, so that it can run to its end: ranks never wait for each other for ever.

    Args:
        stage_ids: The stages of every rank.
        costs: Times and bytes per stage.
        num_microbatches: Microbatches per step.
        limits: Bytes of activations per rank.
        rules: How to choose.

    Returns:
        An order; None if some rank has no room for one microbatch.
    """
    clock = _Chooser(stage_ids, costs, num_microbatches, limits, rules)
    if any(need > limit for need, limit in zip(clock.whole, limits, strict=True)):
        return None
    return clock.run()


def refit(
    order: Order, costs: StageCosts, limits: Sequence[float], patience: float = 0.0
) -> Order | None:
    """Return an order with its weight halves put where they fit these costs and limits.

    Forwards and input halves stay in their order on each rank. A forward waits until it has room.

    Args:
        order: An order with split backwards.
        costs: Times and bytes per stage.
        limits: Bytes of activations per rank.
        patience: See `Rules`.

    Returns:
        An order; None if the limits are too tight for these forwards.
    """
    actions = [action for row in order.values() for action in row if action is not None]
    stage_ids = {
        rank: sorted({action.stage_index for action in row if action is not None})
        for rank, row in order.items()
    }
    num_microbatches = 1 + max(action.microbatch for action in actions)
    clock = _Follower(stage_ids, costs, num_microbatches, limits, Rules(patience=patience))
    clock.skeletons = {
        rank: deque(a for a in row if a is not None and a.kind != "W")
        for rank, row in order.items()
    }
    clock.run()
    return None if any(clock.skeletons.values()) else clock.rows


class _Clock:
    """Event-driven time over all ranks; subclasses choose what a free rank does next."""

    def __init__(
        self,
        stage_ids: Mapping[int, Sequence[int]],
        costs: StageCosts,
        num_microbatches: int,
        limits: Sequence[float],
        rules: Rules,
    ) -> None:
        num_stages = sum(map(len, stage_ids.values()))
        self.last, self.rules = num_stages - 1, rules
        self.limits = [limit * (1 + 1e-9) for limit in limits]  # sums of bytes are rounded
        # Later stages first: they are asked first for a backward, and mostly for a forward.
        self.stages = {rank: sorted(ids, reverse=True) for rank, ids in stage_ids.items()}
        self.rank_of = {stage: rank for rank, ids in stage_ids.items() for stage in ids}
        self.time = costs.durations(num_stages)
        self.activation = costs.per_stage("activation_bytes", num_stages)
        kept = costs.per_stage("kept_for_weight", num_stages)
        self.kept = [share * size for share, size in zip(kept, self.activation, strict=True)]
        latency = costs.per_stage("latency", num_stages)
        size, speed = (costs.per_stage(n, num_stages) for n in ("boundary_bytes", "bandwidth"))
        self.travel = [
            late + bytes_ / rate for late, bytes_, rate in zip(latency, size, speed, strict=True)
        ]
        self.whole = [sum(self.activation[s] for s in stage_ids[r]) for r in sorted(stage_ids)]
        # When the input of each action is there, per stage and microbatch, once that is known.
        self.forward_at = [[_NEVER] * num_microbatches for _ in range(num_stages)]
        self.forward_at[0] = [0.0] * num_microbatches
        self.backward_at = [[_NEVER] * num_microbatches for _ in range(num_stages)]
        self.weights: dict[int, deque[tuple[int, int]]] = {rank: deque() for rank in stage_ids}
        self.held = dict.fromkeys(stage_ids, 0.0)
        self.free = dict.fromkeys(stage_ids, 0.0)
        self.rows: dict[int, list[Action | None]] = {rank: [] for rank in stage_ids}
        self.wakes = [(0.0, rank) for rank in sorted(stage_ids)]

    def run(self) -> Order:
        """Let every rank act until nothing is left that it can do."""
        while self.wakes:
            now, rank = heapq.heappop(self.wakes)
            if now < self.free[rank]:
                continue  # it has been busy since this was planned
            action = self.choose(rank, now)
            if action is not None:
                self._start(rank, action, now)
        return self.rows

    def choose(self, rank: int, now: float) -> Action | None:
        """Return what to do now; None to wait, with a wake planned if it is known for when."""
        raise NotImplementedError

    def hold(self, rank: int, stage: int) -> float:
        """Return the bytes that a forward of a stage claims."""
        return self.activation[stage]

    def arrival(self, kind: str, stage: int, m: int) -> float:
        """Return when an action's input is there, as far as that is known yet."""
        arrivals = (self.forward_at if kind == "F" else self.backward_at)[stage]
        return arrivals[m] if m < len(arrivals) else _NEVER

    def weight_or_wait(self, rank: int, now: float, until: float, blocked: bool) -> Action | None:
        """A weight half, to make room or to fill the wait; else a wake at its end."""
        if self.weights[rank]:
            stage, m = self.weights[rank][0]
            if blocked or until - now >= self.rules.patience * self.time["W"][stage]:
                return Action(stage, "W", m)
        if until < _NEVER:
            heapq.heappush(self.wakes, (until, rank))
        return None

    def _start(self, rank: int, action: Action, now: float) -> None:
        stage, kind, m = action
        end = now + self.time[kind][stage]
        self.rows[rank].append(action)
        if kind == "F":
            self.held[rank] += self.hold(rank, stage)
            if stage == self.last:
                self.backward_at[stage][m] = end
            else:
                self.forward_at[stage + 1][m] = self._arrival_after(stage, stage + 1, rank, end)
        elif kind == "W":
            self.weights[rank].popleft()
            self.held[rank] -= self.kept[stage]
        else:
            self.held[rank] -= self.activation[stage]
            if kind == "I":
                self.weights[rank].append((stage, m))
                self.held[rank] += self.kept[stage]
            if stage:
                self.backward_at[stage - 1][m] = self._arrival_after(
                    stage - 1, stage - 1, rank, end
                )
        self.free[rank] = end
        heapq.heappush(self.wakes, (end, rank))

    def _arrival_after(self, link: int, stage: int, source: int, end: float) -> float:
        """Return when what was made by `end` reaches a stage; its rank is woken then."""
        target = self.rank_of[stage]
        if target == source:
            return end
        time = end + self.travel[link]
        heapq.heappush(self.wakes, (max(time, self.free[target]), target))
        return time


class _Chooser(_Clock):
    """Any action that can run may be next; rules say which."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.entry = {rank: stages[-1] for rank, stages in self.stages.items()}
        self.came = dict.fromkeys(self.stages, "B")  # the last that was no weight half
        # The next microbatch of each stage.
        self.forwards = dict.fromkeys(self.rank_of, 0)
        self.backwards = dict.fromkeys(self.rank_of, 0)

    def hold(self, rank: int, stage: int) -> float:
        """All of a rank's stages are claimed for a microbatch when it enters the first."""
        return self.whole[rank] if stage == self.entry[rank] else 0.0

    def choose(self, rank: int, now: float) -> Action | None:
        """Take a backward or a forward that is here; else a weight half, or wait."""
        backward, backward_at = self._backward(rank, now)
        rules = self.rules
        if backward and (
            rules.prefer == "backward" or (rules.prefer == "other" and self.came[rank] == "F")
        ):
            return self._take(rank, backward)
        forward, forward_at, blocked = self._forward(rank, now)
        action = forward or backward
        if action:
            return self._take(rank, action)
        return self.weight_or_wait(rank, now, min(forward_at, backward_at), blocked)

    def _take(self, rank: int, action: Action) -> Action:
        came = "F" if action.kind == "F" else "B"
        (self.forwards if came == "F" else self.backwards)[action.stage_index] += 1
        self.came[rank] = came
        return action

    def _backward(self, rank: int, now: float) -> tuple[Action | None, float]:
        soonest = _NEVER
        for stage in self.stages[rank]:
            m = self.backwards[stage]
            arrival = self.arrival("B", stage, m)
            if arrival <= now:
                return Action(stage, "I" if self.rules.split and stage else "B", m), arrival
            soonest = min(soonest, arrival)
        return None, soonest

    def _forward(self, rank: int, now: float) -> tuple[Action | None, float, bool]:
        soonest, blocked = _NEVER, False
        stages = self.stages[rank] if self.rules.deep_first else self.stages[rank][::-1]
        for stage in stages:
            m = self.forwards[stage]
            arrival = self.arrival("F", stage, m)
            if self.held[rank] + self.hold(rank, stage) > self.limits[rank]:
                blocked = blocked or (stage == self.entry[rank] and arrival <= now)
            elif arrival <= now:
                return Action(stage, "F", m), arrival, blocked
            else:
                soonest = min(soonest, arrival)
        return None, soonest, blocked


class _Follower(_Clock):
    """Forwards and backwards come in a given order."""

    skeletons: dict[int, deque[Action]]

    def choose(self, rank: int, now: float) -> Action | None:
        """Take the next of the skeleton when it can run; else a weight half, or wait."""
        skeleton = self.skeletons[rank]
        if not skeleton:
            return self.weight_or_wait(rank, now, _NEVER, blocked=True)
        action = skeleton[0]
        stage, kind, m = action
        arrival = self.arrival(kind, stage, m)
        full = kind == "F" and self.held[rank] + self.activation[stage] > self.limits[rank]
        if arrival <= now and not full:
            skeleton.popleft()
            return action if stage or kind == "F" else Action(stage, "B", m)
        return self.weight_or_wait(rank, now, arrival if arrival > now else _NEVER, full)
