"""A plan as text. No torch."""

from collections.abc import Sequence
from typing import Protocol

from pp_schedule.balancing import fold_counts
from pp_schedule.planner.judge import Candidate

_SHOWN = 12


class _Plan(Protocol):
    @property
    def best(self) -> Candidate: ...
    @property
    def candidates(self) -> tuple[Candidate, ...]: ...
    @property
    def baseline(self) -> Candidate: ...
    @property
    def advice(self) -> tuple[str, ...]: ...
    def why_not(self, candidate: Candidate) -> str: ...


def report(plan: _Plan) -> str:
    """Return the ranked candidates as a table, then what was chosen and what would help."""
    best = plan.best
    header = (
        "",
        "schedule",
        "stages/rank",
        "microbatch",
        "x ideal",
        "x bound",
        "idle",
        "peak memory",
        "layers",
        "",
    )
    shown = list(plan.candidates[:_SHOWN])
    if best not in shown:
        shown.append(best)
    rows = [_row(candidate, plan.why_not(candidate), candidate is best) for candidate in shown]
    rows.append(_row(plan.baseline, "for comparison: as many layers on each rank", False))
    lines = _table([header, *rows])
    gain = plan.baseline.expected_time / best.expected_time
    lines += [
        "",
        f"Chosen: {best.schedule}, {best.stages_per_rank} stage"
        f"{'s' * (best.stages_per_rank > 1)} per rank, {best.num_microbatches} microbatches of "
        f"{best.microbatch_size}: {gain:.2f} x as fast as 1F1B with an even split",
        f"Step: {_time(best.step_time)}, {_time(best.expected_time)} when times vary; ideal "
        f"{_time(best.ideal_time)}, lower bound {_time(best.lower_bound)}",
        f"Split: {best.balance}",
        f"Peak memory: {_memory(best.peak_memory)}",
    ]
    return "\n".join([*lines, *(f"Note: {sentence}" for sentence in plan.advice)])


def _row(candidate: Candidate, reason: str, is_best: bool) -> tuple[str, ...]:
    return (
        "->" if is_best else "",
        candidate.schedule,
        f"{candidate.stages_per_rank}{' V' if candidate.style == 'v' else ''}",
        f"{candidate.num_microbatches} x {candidate.microbatch_size}",
        f"{candidate.expected_time / candidate.ideal_time:.3f}",
        f"{candidate.step_time / candidate.lower_bound:.3f}",
        f"{100 * candidate.bubble_fraction:.1f} %",
        f"{max(candidate.peak_memory) / 1e9:.1f} GB",
        fold_counts(candidate.layer_counts),
        reason,
    )


def _memory(peaks: Sequence[float]) -> str:
    if len(peaks) <= 16:
        return ", ".join(f"{size / 1e9:.1f}" for size in peaks) + " GB per rank"
    most = max(peaks)
    return f"{min(peaks) / 1e9:.1f} to {most / 1e9:.1f} GB, most on rank {peaks.index(most)}"


def _time(value: float) -> str:
    if value >= 1e6:  # work that is not in seconds
        return f"{value:.3g}"
    return f"{value:.3f} s" if value >= 1 else f"{1000 * value:.2f} ms"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
