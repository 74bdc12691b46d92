"""Bytes over time on each rank, from a clock's spans and transfers. No torch."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter

from pp_schedule.stage_costs import StageCosts
from pp_schedule.timeline import Span, Transfer

Curve = tuple[tuple[float, float], ...]
_Change = tuple[float, float]  # a time, and the bytes that come (or, below 0, go) then


def memory_curves(
    stages_of: Mapping[int, Iterable[int]],
    spans: Iterable[Span],
    transfers: Iterable[Transfer],
    costs: StageCosts,
) -> tuple[list[Curve], list[float]]:
    """Return each rank's bytes as steps over time, and its peak.

    What a backward itself needs while it runs is not counted, nor what a sender keeps until its
    message has left.

    Args:
        stages_of: The stages of each rank.
        spans: Every action; those of a rank in the order it runs them.
        transfers: Every message between ranks.
        costs: Bytes per stage.
    """
    num_stages = 1 + max(stage for stages in stages_of.values() for stage in stages)
    base = [
        parameters + buffers
        for parameters, buffers in zip(
            costs.per_stage("parameter_bytes", num_stages),
            costs.per_stage("buffer_bytes", num_stages),
            strict=True,
        )
    ]
    changes = _activation_changes(stages_of, spans, costs, num_stages)
    boundary = costs.per_stage("boundary_bytes", num_stages)
    if costs.buffer_bytes is None and any(boundary):
        _add_receives(changes, spans, transfers, boundary)
    curves, peaks = [], []
    for rank in sorted(stages_of):
        curve, peak = _steps(sum(base[stage] for stage in stages_of[rank]), changes[rank])
        curves.append(curve)
        peaks.append(peak)
    return curves, peaks


def _activation_changes(
    ranks: Iterable[int], spans: Iterable[Span], costs: StageCosts, num_stages: int
) -> dict[int, list[_Change]]:
    whole = costs.per_stage("activation_bytes", num_stages)
    changes: dict[int, list[_Change]] = {rank: [] for rank in ranks}
    if not any(whole):
        return changes
    kept = [
        share * size
        for share, size in zip(costs.per_stage("kept_for_weight", num_stages), whole, strict=True)
    ]
    kept[0] = whole[0]  # its input half is no work and frees nothing
    for rank, (stage, kind, _), start, end in spans:
        if kind == "F":
            changes[rank].append((start, whole[stage]))
        elif kind == "B":
            changes[rank].append((end, -whole[stage]))
        elif kind == "I":
            changes[rank].append((end, kept[stage] - whole[stage]))
        else:
            changes[rank].append((end, -kept[stage]))
    return changes


def _add_receives(
    changes: Mapping[int, list[_Change]],
    spans: Iterable[Span],
    transfers: Iterable[Transfer],
    boundary: list[float],
) -> None:
    """Add each receive, from the start of its transfer to its use."""
    used: dict[tuple[int, str, int], float] = {}  # whole backwards and input halves alike are "B"
    for _, (stage, kind, m), start, end in spans:
        if kind == "F":
            used[stage, "F", m] = start
        elif kind != "W":
            used[stage, "B", m] = end
    for _, target, (stage, kind, m), start, _ in transfers:
        if kind == "F":
            user, size = (stage + 1, "F", m), boundary[stage]
        else:
            user, size = (stage - 1, "B", m), boundary[stage - 1]
        changes[target].append((start, size))
        if user in used:
            changes[target].append((used[user], -size))


def _steps(base: float, changes: list[_Change]) -> tuple[Curve, float]:
    """Add changes up; at one time, what goes goes before what comes."""
    curve = [(0.0, base)]
    size = peak = base
    for time, together in groupby(sorted(changes), key=itemgetter(0)):
        for _, change in together:
            size += change
            peak = max(peak, size)
        if time == curve[-1][0]:
            curve[-1] = (time, size)
        elif size != curve[-1][1]:
            curve.append((time, size))
    return tuple(curve), peak
