"""Pictures of an order: text for a terminal, PNG for a page. No torch."""

from pathlib import Path
from typing import Any

from pp_schedule.orders import Order
from pp_schedule.simulator import Costs, Timeline, simulate

_NAMES = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight backward"}
_HUES = {"F": "Blues", "B": "Greens", "I": "Oranges", "W": "Purples"}


def draw_text(order: Order, costs: Costs | None = None, width: int = 100) -> str:
    """Return the order as text, a line per rank, time to the right.

    Each action is its kind and its microbatch: `F3` is a forward, `B3` a backward, and so on; with
    several stages per rank the stage comes first, `1F3`. Dashes go on with it, a dot is idle
    time. What does not fit the width is cut, with the number of time units left out.

    Args:
        order: Actions per rank.
        costs: Times per action; the default counts a backward as two forwards.
        width: Columns to use.
    """
    timeline = simulate(order, costs)
    unit = min(span.end - span.start for span in timeline.spans if span.end > span.start)
    several = any(len({a.stage_index for a in row if a}) > 1 for row in order.values())
    labels = {
        span: (str(span.action.stage_index) if several else "")
        + f"{span.action.kind}{span.action.microbatch}"
        for span in timeline.spans
    }
    cell = max(len(label) for label in labels.values()) + 1
    prefix = max(len(f"rank {rank} ") for rank in order)
    num_cells = max(1, (width - prefix) // cell)
    lines = []
    for rank in sorted(order):
        line = ["." + " " * (cell - 1)] * num_cells
        for span in timeline.spans:
            first, last = round(span.start / unit), round(span.end / unit)
            if span.rank == rank and last > first:
                for column in range(first, min(last, num_cells)):
                    line[column] = "-" * (cell - 1) + " "
                if first < num_cells:
                    line[first] = labels[span].ljust(cell)
        used = min(num_cells, round(timeline.makespan / unit))
        lines.append(f"rank {rank}".ljust(prefix) + "".join(line[:used]).rstrip())
    cut = round(timeline.makespan / unit) - num_cells
    if cut > 0:
        lines.append(f"(and {cut} more units of time)")
    return "\n".join(lines)


def draw_png(
    order: Order, path: str | Path, costs: Costs | None = None, title: str | None = None
) -> None:
    """Write the order as a PNG: a row per rank, a box per action, idle time left white.

    Colour tells the kind of action and shade the stage; the number is the microbatch.

    Args:
        order: Actions per rank.
        path: Where to write.
        costs: Times per action; the default counts a backward as two forwards.
        title: A line above the picture; the bubble is added to it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise ImportError("draw_png needs matplotlib: pip install 'pp-schedule[plot]'") from error

    timeline = simulate(order, costs)
    num_stages = 1 + max(span.action.stage_index for span in timeline.spans)
    figure = Figure(figsize=(max(8.0, min(40.0, timeline.makespan / 4)), 1.4 + 0.55 * len(order)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    per_unit = figure.get_figwidth() / timeline.makespan
    for span in timeline.spans:
        length = span.end - span.start
        if length <= 0:
            continue
        colour = _shade(span.action.kind, span.action.stage_index, num_stages, colormaps)
        box = Rectangle((span.start, span.rank - 0.42), length, 0.84, fc=colour, ec="white", lw=0.8)
        axes.add_patch(box)
        if length * per_unit > 0.14:
            middle = (span.start + length / 2, span.rank)
            number = str(span.action.microbatch)
            axes.annotate(number, middle, ha="center", va="center", fontsize=8, color="#1a1a1a")
    axes.set(xlim=(0, timeline.makespan), ylim=(len(order) - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(len(order)), [f"rank {rank}" for rank in sorted(order)])
    axes.set_title(_title(title, timeline), fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = [kind for kind in "FBIW" if any(span.action.kind == kind for span in timeline.spans)]
    patches = [Patch(color=_shade(kind, 0, 1, colormaps), label=_NAMES[kind]) for kind in kinds]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=patches, ncols=len(kinds), fontsize=8, frameon=False, **place)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)


def _title(title: str | None, timeline: Timeline) -> str:
    bubble = f"bubble {100 * timeline.bubble_fraction:.1f} %"
    return f"{title}, {bubble}" if title else bubble


def _shade(kind: str, stage: int, num_stages: int, colormaps: Any) -> Any:
    strength = 0.45 if num_stages == 1 else 0.3 + 0.4 * stage / (num_stages - 1)
    return colormaps[_HUES[kind]](strength)
