"""A timeline as one HTML file, which needs no network and no library."""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pp_schedule.draw.look import KINDS, colour, kinds_in, memory_of, rows_of, timeline_of
from pp_schedule.orders import Order
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Timeline


def draw_html(
    shown: Order | Timeline,
    path: str | Path,
    costs: StageCosts | None = None,
    title: str | None = None,
    simulated: Order | Timeline | None = None,
    unit: str = "",
) -> None:
    """Write an HTML page: a row per rank, a box per action, to zoom into and to point at.

    Below each rank is its memory, where the timeline knows bytes, and above all ranks how many
    of them are idle. What is thinner than a pixel is merged until one zooms in.

    Args:
        shown: An order, or a timeline.
        path: Where to write.
        costs: Times per action of an order; the default counts a backward as two forwards.
        title: The heading.
        simulated: What was expected, drawn below on the same axis of time; `shown` is then called
            measured.
        unit: The unit of time, written behind times; with `"s"` short ones are shown in ms and us.
    """
    timelines = {"": timeline_of(shown, costs)}
    if simulated is not None:
        timelines = {"measured": timelines[""], "simulated": timeline_of(simulated, costs)}
    title = title or "Pipeline schedule"
    stages = [span.action.stage_index for t in timelines.values() for span in t.spans]
    num_stages = 1 + max(stages)
    found = {kind for timeline in timelines.values() for kind in kinds_in(timeline)}
    kinds = [kind for kind in KINDS if kind in found]
    data = {
        "title": title,
        "unit": unit,
        "kinds": {kind: KINDS[kind] for kind in kinds},
        "colours": {
            kind: [colour(kind, s, num_stages) for s in range(num_stages)] for kind in kinds
        },
        "timelines": [_data(name, timeline, kinds) for name, timeline in timelines.items()],
    }
    # A title may hold what begins or ends a script; JSON can be written without that sign.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = files("pp_schedule.draw").joinpath("page.html").read_text(encoding="utf-8")
    parts = {"{{title}}": escape(title), "{{data}}": text}
    page = re.sub("|".join(parts), lambda match: parts[match[0]], page)
    Path(path).write_text(page, encoding="utf-8")


def _data(name: str, timeline: Timeline, kinds: list[str]) -> dict[str, Any]:
    """Return a timeline as the page's script reads it: flat lists of numbers, which are short."""
    ranks = []
    for rank, row in rows_of(timeline).items():
        ranks.append(
            {
                "bubble": timeline.bubbles[rank],
                "peak": timeline.peak_memory[rank] if timeline.peak_memory else 0.0,
                "spans": [
                    number
                    for span in row
                    for number in (
                        kinds.index(span.action.kind),
                        span.action.stage_index,
                        span.action.microbatch,
                        _short(span.start),
                        _short(span.end),
                    )
                ],
                "memory": [
                    _short(number) for point in memory_of(timeline, rank) for number in point
                ],
            }
        )
    return {
        "name": name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        "ranks": ranks,
    }


def _short(number: float) -> float:
    """Round to eight digits, and write whole numbers without a point."""
    rounded = float(f"{number:.8g}")
    return int(rounded) if rounded.is_integer() else rounded
