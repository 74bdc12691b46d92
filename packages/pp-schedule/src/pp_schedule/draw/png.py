"""A timeline as PNG."""

from pathlib import Path
from typing import Any

from pp_schedule.draw.look import KINDS, colour, headline, kinds_in, timeline_of
from pp_schedule.orders import Order
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Timeline


def draw_png(
    shown: Order | Timeline,
    path: str | Path,
    costs: StageCosts | None = None,
    title: str | None = None,
) -> None:
    """Write a PNG: a row per rank, a box per action, idle time left white.

    Colour tells the kind of action and shade the stage; the number is the microbatch.

    Args:
        shown: An order, or a timeline.
        path: Where to write.
        costs: Times per action of an order; the default counts a backward as two forwards.
        title: A line above the picture; the bubble is added to it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("draw_png needs matplotlib: pip install 'pp-schedule[plot]'") from error

    timeline = timeline_of(shown, costs)
    num_ranks = len(timeline.bubbles)
    # As wide as the shortest actions need, whatever the unit of time.
    lengths = sorted(span.end - span.start for span in timeline.spans if span.end > span.start)
    units = timeline.makespan / lengths[len(lengths) // 10]
    figure = Figure(figsize=(max(8.0, min(40.0, units / 4)), 1.4 + 0.55 * num_ranks))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _boxes(axes, timeline, figure.get_figwidth() / timeline.makespan)
    axes.set(xlim=(0, timeline.makespan), ylim=(num_ranks - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.set_title(headline(title, timeline), fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = kinds_in(timeline)
    patches = [Patch(color=colour(kind, 0, 1), label=KINDS[kind]) for kind in kinds]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=patches, ncols=len(kinds), fontsize=8, frameon=False, **place)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)


def _boxes(axes: Any, timeline: Timeline, inches: float) -> None:
    """Draw the actions; `inches` is the width of one unit of time."""
    num_stages = 1 + max(span.action.stage_index for span in timeline.spans)
    # A few collections of boxes are drawn much faster than many boxes.
    alike: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rank, (stage, kind, microbatch), start, end in timeline.spans:
        length = end - start
        if length <= 0:
            continue
        alike.setdefault((rank, colour(kind, stage, num_stages)), []).append((start, length))
        if length * inches > 0.14:
            middle = (start + length / 2, rank)
            text = {"ha": "center", "va": "center", "fontsize": 8, "color": "#1a1a1a"}
            axes.annotate(str(microbatch), middle, **text)
    for (rank, shade), boxes in alike.items():
        axes.broken_barh(boxes, (rank - 0.42, 0.84), facecolor=shade, edgecolor="white", lw=0.8)
