"""A timeline as text."""

from pp_schedule.draw.look import rows_of, timeline_of
from pp_schedule.orders import Order
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Span, Timeline


def draw_text(
    shown: Order | Timeline,
    costs: StageCosts | None = None,
    width: int = 100,
    unit: float | None = None,
) -> str:
    """Return a line per rank, time to the right.

    Each action is its kind and its microbatch: `F3` is a forward, `B3` a backward, and so on; with
    several stages per rank the stage comes first, `1F3`. Dashes go on with it, a dot is idle
    time. What does not fit the width is cut, with the number of time units left out.

    Args:
        shown: An order, or a timeline.
        costs: Times per action of an order; the default counts a backward as two forwards.
        width: Columns to use.
        unit: Time per column. The default is the shortest action's where all take whole numbers of
            it; else, as in a measured run, what makes all fit the width. Then actions that begin
            in one column hide each other.
    """
    timeline = timeline_of(shown, costs)
    rows = rows_of(timeline)
    several = any(len({s.action.stage_index for s in row}) > 1 for row in rows.values())
    labels = {
        span: (str(span.action.stage_index) if several else "")
        + f"{span.action.kind}{span.action.microbatch}"
        for span in timeline.spans
    }
    cell = max(len(label) for label in labels.values()) + 1
    prefix = max(len(f"rank {rank} ") for rank in rows)
    num_cells = max(1, (width - prefix) // cell)
    unit = unit or _unit(timeline) or timeline.makespan / num_cells
    used = min(num_cells, round(timeline.makespan / unit))
    lines = []
    for rank, row in rows.items():
        cells = _cells(row, labels, unit, used)
        line = "".join(text.ljust(cell) for text in cells).rstrip()
        lines.append(f"rank {rank}".ljust(prefix) + line)
    cut = round(timeline.makespan / unit) - num_cells
    if cut > 0:
        lines.append(f"(and {cut} more units of time)")
    return "\n".join(lines)


def _cells(row: list[Span], labels: dict[Span, str], unit: float, count: int) -> list[str]:
    """Return what stands in each column of a rank's line."""
    dashes = "-" * max(map(len, labels.values()))
    cells = ["."] * count
    for span in row:
        first, last = round(span.start / unit), round(span.end / unit)
        for column in range(first, min(last, count)):
            cells[column] = labels[span] if column == first else dashes
    return cells


def _unit(timeline: Timeline) -> float | None:
    """Return the shortest action's time if every action takes a whole number of it."""
    times = [span.end - span.start for span in timeline.spans if span.end > span.start]
    shortest = min(times)
    whole = all(abs(time / shortest - round(time / shortest)) < 1e-6 for time in times)
    return shortest if whole else None
