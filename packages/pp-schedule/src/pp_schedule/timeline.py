"""What a simulation yields: when each action and each message starts and ends. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pp_schedule.orders import Action


class Span(NamedTuple):
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message on the clock, from a rank to another."""

    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    action: Action
    """What made it: a forward sends its output on, a backward (`B` or `I`) a gradient back."""
    start: float
    """When the link takes it: the end of `action`, or later if the link is busy."""
    end: float
    """When it has arrived."""


@dataclass(frozen=True)
class Timeline:
    """What `simulate` returns. Times are in the unit of the costs."""

    spans: tuple[Span, ...] = field(repr=False)
    """Every action with its rank, start and end; those of a rank in the order it runs them."""
    makespan: float
    """End of the last action; the first starts at 0."""
    bubbles: tuple[float, ...]
    """Per rank, the share of the makespan (0 to 1) in which it computes nothing."""
    transfers: tuple[Transfer, ...] = field(default=(), repr=False)
    """Every message between ranks; those of a rank in the order it sends them."""
    peak_memory: tuple[float, ...] = ()
    """Per rank, the most bytes at any time."""
    curves: tuple[tuple[tuple[float, float], ...], ...] = field(default=(), repr=False)
    """Per rank, what `memory` returns."""

    @property
    def bubble_fraction(self) -> float:
        """The mean of `bubbles`."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def rank_spans(self) -> tuple[float, ...]:
        """Per rank, the time from the start of its first action to the end of its last.

        Papers on zero bubble count idle time within it, which supposes that a rank may take its
        optimizer step alone. Clipping by a global norm waits for the makespan.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for span in self.spans:
            first.setdefault(span.rank, span.start)
            last[span.rank] = span.end
        return tuple(last[rank] - first[rank] for rank in sorted(first))

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return a rank's bytes over time as steps: each pair is a time and the bytes from it on.

        The first pair is at time 0, and times increase.
        """
        return list(self.curves[rank])
