"""What was measured, as a timeline and as costs. No torch."""

from collections.abc import Sequence
from statistics import median

from pp_schedule.orders import Action
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Span, Timeline, Transfer

Measurement = tuple[Action, float, float]
"""An action, its start and its end, in seconds of some clock."""


def split_steps(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Cut what a rank did into steps: no step runs an action twice."""
    steps: list[list[Measurement]] = []
    seen: set[Action] = set()
    for measurement in measurements:
        action = measurement[0]
        if not steps or action in seen:
            steps.append([])
            seen = set()
        steps[-1].append(measurement)
        seen.add(action)
    return steps


def measured_timeline(rows: Sequence[Sequence[Measurement]]) -> Timeline:
    """Return one step of all ranks as a timeline that starts at 0.

    A transfer lasts from the end of the action that made it to the start of the one that used it:
    the message itself took that time or less.

    Args:
        rows: Per rank, its actions as it ran them, all on one clock.
    """
    begin = min(start for row in rows for _, start, _ in row)
    spans = tuple(
        Span(rank, action, start - begin, end - begin)
        for rank, row in enumerate(rows)
        for action, start, end in row
    )
    makespan = max(span.end for span in spans)
    busy = [sum(end - start for _, start, end in row) for row in rows]
    bubbles = tuple(1.0 - time / makespan if makespan else 0.0 for time in busy)
    return Timeline(spans, makespan, bubbles, tuple(_transfers(spans)))


def measured_costs(timeline: Timeline) -> StageCosts:
    """Return the median times of a measured run's actions, for `simulate`.

    Full backwards are counted as two equal halves, except on a stage that also splits them.
    """
    num_stages = 1 + max(span.action.stage_index for span in timeline.spans)
    times: dict[tuple[int, str], list[float]] = {}
    for _, action, start, end in timeline.spans:
        times.setdefault((action.stage_index, action.kind), []).append(end - start)

    def typical(stage: int, kind: str, otherwise: float = 0.0) -> float:
        return max(0.0, median(times.get((stage, kind), [otherwise])))

    halves = [typical(stage, "B") / 2 for stage in range(num_stages)]
    return StageCosts(
        forward=[typical(stage, "F") for stage in range(num_stages)],
        backward_input=[typical(stage, "I", half) for stage, half in enumerate(halves)],
        backward_weight=[typical(stage, "W", half) for stage, half in enumerate(halves)],
    )


def _transfers(spans: Sequence[Span]) -> list[Transfer]:
    by_action = {span.action: span for span in spans}
    transfers = []
    for sent in spans:
        stage, kind, m = sent.action
        if kind == "W":
            continue
        users = (
            [Action(stage + 1, "F", m)]
            if kind == "F"
            else [Action(stage - 1, "B", m), Action(stage - 1, "I", m)]
        )
        used = next((by_action[user] for user in users if user in by_action), None)
        if used is not None and used.rank != sent.rank:
            end = max(sent.end, used.start)  # clocks may disagree by more than a message takes
            transfers.append(Transfer(sent.rank, used.rank, sent.action, sent.end, end))
    return transfers
