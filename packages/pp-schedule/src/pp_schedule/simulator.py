"""A clock for orders: when actions and messages start and end, idle time, memory. No torch."""

from collections.abc import Mapping, Sequence
from random import Random

from pp_schedule.memory import memory_curves
from pp_schedule.orders import Action, Order
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Span, Timeline, Transfer

__all__ = ["Span", "StageCosts", "Timeline", "Transfer", "simulate", "step_time"]

_Row = Sequence[Action]


def simulate(order: Order, costs: StageCosts | None = None) -> Timeline:
    """Run an order against a clock: an action starts when its rank is free and its input is there.

    A rank computes while its messages travel. A message leaves when its action ends, or when the
    link (one per pair of ranks and direction) has taken the one before. Between two stages of one
    rank nothing is sent. Idle steps (`None`) take no time: waiting follows from what an action
    needs.

    Args:
        order: Actions per rank; see `pp_schedule.orders`.
        costs: Times and bytes per stage; the default counts a backward as two forwards, and
            neither messages nor bytes.

    Raises:
        ValueError: If some action waits for ever, if nothing is in the order, or if the costs are
            those of another number of stages.
    """
    costs = costs or StageCosts()
    rows = {rank: [a for a in row if a is not None] for rank, row in order.items()}
    if not any(rows.values()):
        raise ValueError("the order holds no action")
    clock = _Clock(rows, costs)
    clock.run()
    makespan = max(span.end for span in clock.spans)
    bubbles = tuple(1.0 - clock.busy[rank] / makespan if makespan else 0.0 for rank in sorted(rows))
    stages = {rank: sorted({a.stage_index for a in row}) for rank, row in rows.items()}
    curves, peaks = memory_curves(stages, clock.spans, clock.transfers, costs)
    return Timeline(
        tuple(clock.spans), makespan, bubbles, tuple(clock.transfers), tuple(peaks), tuple(curves)
    )


def step_time(
    order: Order, costs: StageCosts | None = None, jitter: float = 0.0, seed: int = 0
) -> float:
    """Return the makespan alone, in a third of the time of `simulate`.

    Args:
        order: Actions per rank.
        costs: Times and bytes per stage, as for `simulate`.
        jitter: Spread of the times: each action's is multiplied by a random number, normal around
            1 with this standard deviation, and 0 at least. Orders that fit exact times closely may
            lose much when times vary.
        seed: Same seed, same times: the n-th action of a rank gets the same number in every order.

    Raises:
        ValueError: As `simulate` does.
    """
    rows = {rank: [a for a in row if a is not None] for rank, row in order.items()}
    if not any(rows.values()):
        raise ValueError("the order holds no action")
    clock = _Clock(rows, costs or StageCosts(), keep=False)
    if jitter:
        clock.factors = {
            rank: _factors(Random(f"{seed} {rank}"), jitter, len(row)) for rank, row in rows.items()
        }
    clock.run()
    return max(clock.free.values())


def _factors(random: Random, jitter: float, count: int) -> list[float]:
    return [max(0.0, random.gauss(1.0, jitter)) for _ in range(count)]


class _Clock:
    """The state of a simulation.

    Ranks run one at a time, each until it misses something that another has to send; what arrives
    wakes the rank that waits for it. Every time follows from earlier ones alone, so the order in
    which ranks are woken does not matter, and each action is looked at once or twice.

    A slot numbers a forward or a backward of a stage and a microbatch, whether split or not.
    """

    def __init__(self, rows: Mapping[int, _Row], costs: StageCosts, keep: bool = True) -> None:
        actions = [action for row in rows.values() for action in row]
        self.rows = rows
        self.num_stages = 1 + max(action.stage_index for action in actions)
        self.num_microbatches = 1 + max(action.microbatch for action in actions)
        self.half = self.num_stages * self.num_microbatches  # backward slots begin here
        self.rank_of = {a.stage_index: rank for rank, row in rows.items() for a in row}
        self.durations = costs.durations(self.num_stages)
        self.latency = costs.per_stage("latency", self.num_stages)
        self.on_link = [
            size / speed
            for size, speed in zip(
                costs.per_stage("boundary_bytes", self.num_stages),
                costs.per_stage("bandwidth", self.num_stages),
                strict=True,
            )
        ]
        self.arrived: list[float | None] = [None] * (2 * self.half)
        self.arrived[: self.num_microbatches] = [0.0] * self.num_microbatches
        self.arrived[2 * self.half - self.num_microbatches :] = [0.0] * self.num_microbatches
        self.done = bytearray(2 * self.half)  # forwards; backwards or their input halves
        self.position = dict.fromkeys(rows, 0)
        self.free = dict.fromkeys(rows, 0.0)
        self.busy = dict.fromkeys(rows, 0.0)
        self.link_free: dict[tuple[int, int], float] = {}
        self.waiting: dict[int, int] = {}  # the rank that waits for a slot's input
        self.keep = keep  # what happened, or its end alone
        self.factors: dict[int, list[float]] = {}  # that each action's time is multiplied by
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []

    def run(self) -> None:
        """Run every rank to its end."""
        awake = list(self.rows)
        while awake:
            self._advance(awake.pop(), awake)
        stuck = [
            f"{row[self.position[rank]]} on rank {rank}"
            for rank, row in self.rows.items()
            if self.position[rank] < len(row)
        ]
        if stuck:
            raise ValueError("the order never ends, these wait for ever: " + ", ".join(stuck))

    def _advance(self, rank: int, awake: list[int]) -> None:
        row, free, busy = self.rows[rank], self.free[rank], self.busy[rank]
        factors = self.factors.get(rank)
        position = self.position[rank]
        while position < len(row):
            action = row[position]
            stage, kind, m = action
            forward = stage * self.num_microbatches + m
            slot = forward if kind == "F" else forward + self.half
            # What the rank itself must have run before, and what another must have sent.
            if kind != "F" and not self.done[slot if kind == "W" else forward]:
                break
            if kind != "W":
                arrival = self.arrived[slot]
                if arrival is None:
                    self.waiting[slot] = rank
                    break
                free = max(free, arrival)
                self.done[slot] = 1
            duration = self.durations[kind][stage]
            if factors:
                duration *= factors[position]
            end = free + duration
            if self.keep:
                self.spans.append(Span(rank, action, free, end))
            busy += duration
            free = end
            if kind != "W":
                self._send(rank, action, slot, end, awake)
            position += 1
        self.position[rank], self.free[rank], self.busy[rank] = position, free, busy

    def _send(self, rank: int, action: Action, slot: int, end: float, awake: list[int]) -> None:
        """Put an action's output on its way, and wake the rank that waits for it."""
        forward = action.kind == "F"
        stage = action.stage_index + 1 if forward else action.stage_index - 1
        target = self.rank_of.get(stage)
        if target is None:  # the ends of the pipeline
            return
        if target != rank:
            boundary = action.stage_index if forward else stage
            link = (rank, target)
            start = max(end, self.link_free.get(link, 0.0))
            self.link_free[link] = start + self.on_link[boundary]
            end = start + self.on_link[boundary] + self.latency[boundary]
            if self.keep:
                self.transfers.append(Transfer(rank, target, action, start, end))
        slot += self.num_microbatches if forward else -self.num_microbatches
        self.arrived[slot] = end
        if slot in self.waiting:
            awake.append(self.waiting.pop(slot))
