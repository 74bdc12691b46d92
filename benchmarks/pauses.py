"""What a measured run's actions and messages take besides the work that was given to them."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from pp_schedule import Span, StageCosts, Timeline


@dataclass(frozen=True)
class Pauses:
    """Means over a run, in seconds."""

    within: float
    """What an action takes besides its work."""
    between: float
    """From the end of an action to the start of its rank's next one, which waits for nothing."""
    message: float
    """From the end of an action to the start of the one, on an idle rank, that waits for it."""

    @classmethod
    def of(cls, timelines: Iterable[Timeline], work: StageCosts | None = None) -> "Pauses":
        """Find them in a run; without the work that was given, `within` is 0.

        A rank may have waited for a message or not. It has, if what it needed was made after its
        action before; it has not, if nothing had to be sent or it was sent before that action
        began. The rest is left out.
        """
        within, between, message = [0.0], [0.0], [0.0]
        for timeline in timelines:
            sent = {}  # when what an action needs from another rank was made
            for transfer in timeline.transfers:
                stage, kind, m = transfer.action
                sent[(stage + 1, "F", m) if kind == "F" else (stage - 1, "B", m)] = transfer.start
            before: dict[int, Span] = {}
            for span in timeline.spans:
                if work:
                    within.append(span.end - span.start - work.of(span.action))
                last = before.get(span.rank)
                before[span.rank] = span
                if last is None:
                    continue
                stage, kind, m = span.action
                needed = sent.get((stage, "B" if kind == "I" else kind, m), 0.0)
                if needed > last.end:
                    message.append(span.start - needed)
                elif needed <= last.start:
                    between.append(span.start - last.end)
        return cls(*(fmean(found[1:] or found) for found in (within, between, message)))

    def __str__(self) -> str:
        return (
            f"{1e3 * self.within:.2f} ms within an action besides its work, "
            f"{1e3 * self.between:.2f} to the next, {1e3 * self.message:.2f} for a message"
        )
