"""A timeline as a trace file, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pp_schedule.draw.look import KINDS, memory_of, timeline_of
from pp_schedule.orders import Order
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Timeline

Event = dict[str, Any]
_MICROSECONDS = 1e6


def chrome_trace(
    shown: Order | Timeline,
    path: str | Path,
    costs: StageCosts | None = None,
    title: str = "pipeline",
    simulated: Order | Timeline | None = None,
) -> None:
    """Write a trace in the JSON format that Chrome and Perfetto open.

    A thread per rank, a slice per action, an arrow per transfer, and a counter per rank where the
    timeline knows bytes. A unit of time counts as a second.

    Args:
        shown: An order, or a timeline.
        path: Where to write; `.json` by custom.
        costs: Times per action of an order; the default counts a backward as two forwards.
        title: The name of the process in the trace.
        simulated: What was expected, as a second process; `shown` is then called measured.
    """
    timelines = {title: timeline_of(shown, costs)}
    if simulated is not None:
        timelines = {
            f"{title}, measured": timelines[title],
            f"{title}, simulated": timeline_of(simulated, costs),
        }
    events: list[Event] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events += _names(pid, name, len(timeline.bubbles))
        events += _slices(pid, timeline)
        events += _arrows(pid, timeline, first_id=len(events))
        events += _counters(pid, timeline)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def _names(pid: int, name: str, num_ranks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for rank in range(num_ranks):
        place = {"ph": "M", "pid": pid, "tid": rank}
        yield {**place, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(pid: int, timeline: Timeline) -> Iterator[Event]:
    for rank, action, start, end in timeline.spans:
        yield {
            "ph": "X",
            "name": str(action),
            "cat": KINDS[action.kind],
            "pid": pid,
            "tid": rank,
            "ts": start * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "args": {
                "kind": KINDS[action.kind],
                "stage": action.stage_index,
                "microbatch": action.microbatch,
            },
        }


def _arrows(pid: int, timeline: Timeline, first_id: int) -> Iterator[Event]:
    """An arrow from within the slice that sends to the start of the slice that needs it."""
    spans = {span.action: span for span in timeline.spans}
    for number, transfer in enumerate(timeline.transfers):
        sent, stage = spans[transfer.action], transfer.action.stage_index
        ahead = stage + 1 if transfer.action.kind == "F" else stage - 1
        kinds = "F" if transfer.action.kind == "F" else "BI"
        wanted = (transfer.action._replace(stage_index=ahead, kind=kind) for kind in kinds)
        used = next((spans[action] for action in wanted if action in spans), None)
        if used is None:
            continue
        arrow = {"name": "transfer", "cat": "transfer", "pid": pid, "id": first_id + number}
        # A flow is bound to the slice around it: an end belongs to no slice, the middle does.
        middle = (sent.start + sent.end) / 2
        yield {**arrow, "ph": "s", "tid": sent.rank, "ts": middle * _MICROSECONDS}
        end = {"ph": "f", "bp": "e", "tid": used.rank, "ts": used.start * _MICROSECONDS}
        yield {**arrow, **end}


def _counters(pid: int, timeline: Timeline) -> Iterator[Event]:
    for rank in range(len(timeline.bubbles)):
        for time, size in memory_of(timeline, rank):
            yield {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": pid,
                "tid": rank,
                "ts": time * _MICROSECONDS,
                "args": {"bytes": size},
            }
