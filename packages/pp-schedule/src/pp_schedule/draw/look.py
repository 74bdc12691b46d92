"""What all pictures have in common: what is shown, the names of its parts, its colours."""

from pp_schedule.orders import Order
from pp_schedule.simulator import simulate
from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Span, Timeline

KINDS = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight backward"}
# Okabe and Ito's colours, which people who confuse some colours tell apart as well.
_HUES = {"F": (86, 180, 233), "B": (0, 158, 115), "I": (230, 159, 0), "W": (204, 121, 167)}


def timeline_of(shown: Order | Timeline, costs: StageCosts | None = None) -> Timeline:
    """Return a timeline as it is, and that of an order as the simulator makes it.

    Raises:
        ValueError: If there is no action in it, or none that takes any time.
    """
    timeline = shown if isinstance(shown, Timeline) else simulate(shown, costs)
    if not timeline.spans:
        raise ValueError("there is nothing to draw: the timeline has no actions")
    if not timeline.makespan > 0:
        raise ValueError("there is nothing to draw: no action takes any time")
    return timeline


def rows_of(timeline: Timeline) -> dict[int, list[Span]]:
    """Return each rank's actions by their starts, for ranks in order."""
    rows: dict[int, list[Span]] = {rank: [] for rank in range(len(timeline.bubbles))}
    for span in timeline.spans:
        rows[span.rank].append(span)
    return {rank: sorted(row, key=lambda s: (s.start, s.end)) for rank, row in rows.items()}


def kinds_in(timeline: Timeline) -> list[str]:
    """Return the kinds of action that occur, forwards first."""
    found = {span.action.kind for span in timeline.spans}
    return [kind for kind in KINDS if kind in found]


def memory_of(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return a rank's bytes over time, or nothing where the timeline knows none."""
    known = any(timeline.peak_memory)
    return timeline.memory(rank) if known else []


def colour(kind: str, stage: int, num_stages: int) -> str:
    """Return a colour as `#rrggbb`: its hue tells the kind, its shade the stage.

    All are light enough for dark text.
    """
    strength = 0.65 if num_stages == 1 else 0.4 + 0.5 * stage / (num_stages - 1)
    return "#" + "".join(f"{round(255 - (255 - c) * strength):02x}" for c in _HUES[kind])


def headline(title: str | None, timeline: Timeline) -> str:
    """Return the title with the bubble."""
    bubble = f"bubble {100 * timeline.bubble_fraction:.1f} %"
    return f"{title}, {bubble}" if title else bubble
