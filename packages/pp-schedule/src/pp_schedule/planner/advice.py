"""What a plan says in words: why others lose, and what would help. No torch."""

import math

from pp_schedule.costs import Costs
from pp_schedule.planner.judge import Candidate


def reason_against(candidate: Candidate, best: Candidate, gain: float) -> str:
    """Return why a candidate is not the best, in a few words; nothing for the best itself.

    Args:
        candidate: Any candidate.
        best: The one that was chosen.
        gain: By how much an order must be faster to be preferred to one with a name.
    """
    if candidate is best:
        return ""
    if not candidate.fits:
        rank = candidate.peak_memory.index(max(candidate.peak_memory))
        return (
            f"needs {_gb(candidate.peak_memory[rank])} on rank {rank}, "
            f"{_gb(candidate.excess_bytes)} over the limit"
        )
    slower = candidate.expected_time / best.expected_time - 1
    if slower <= 0.0005:
        faster = "as fast" if slower > -0.0005 else f"{-100 * slower:.1f} % faster"
        return f"{faster}, but a named schedule is preferred within {100 * gain:.0f} %"
    if candidate.balance.ratio > 1.02 * best.balance.ratio:
        return f"its heaviest rank has {candidate.balance.ratio:.2f} x the ideal share"
    if candidate.step_time <= best.step_time:
        return f"{100 * slower:.1f} % slower when times vary"
    if candidate.bubble_fraction > best.bubble_fraction:
        return f"idle {100 * candidate.bubble_fraction:.1f} % of the step"
    return f"its actions take {100 * slower:.1f} % longer"


def advice(best: Candidate, costs: Costs, pp_size: int) -> list[str]:
    """Return what would help, as sentences; nothing if the plan is near what is possible."""
    found = [] if best.fits else [_of_memory(best, costs)]
    total = best.balance.ideal * pp_size
    name, part = best.balance.heaviest_part
    share = part / best.balance.ideal if best.balance.ideal else 0.0
    if share > 1.02 and best.balance.ratio > 1.05:
        ranks = max(1, math.floor(total / part))
        remedy = (
            "a vocabulary-parallel head (divided over the ranks) or"
            if name.startswith("the last")
            else "parallelism within it, or"
        )
        found.append(
            f"{name} alone is {share:.2f} x a rank's ideal share, which no split can change: only "
            f"{remedy} fewer ranks would help; {ranks} ranks have a share as large as it"
        )
    if best.bubble_fraction > 0.15 and best.balance.ratio < 1.1:
        found.append(
            f"ranks are idle {100 * best.bubble_fraction:.0f} % of the step: with "
            f"{best.num_microbatches} microbatches on {pp_size} ranks, more of them (a larger "
            "batch, or smaller microbatches) would help"
        )
    return found


def _of_memory(best: Candidate, costs: Costs) -> str:
    rank = best.peak_memory.index(max(best.peak_memory))
    fixed = sum(
        costs.for_stages(best.layer_counts).per_stage("parameter_bytes", len(best.layer_counts))[s]
        for s in {span.action.stage_index for span in best.timeline.spans if span.rank == rank}
    )
    moving = best.peak_memory[rank] - fixed
    text = (
        f"nothing found fits {_gb(best.memory_limit)} per rank; the nearest needs "
        f"{_gb(best.peak_memory[rank])} on rank {rank}: {_gb(fixed)} for parameters, gradients and "
        f"optimizer state, {_gb(moving)} for activations and messages. "
    )
    if fixed > best.memory_limit:
        return text + "More ranks, or sharding parameters (FSDP), would help"
    remedies = ["activation checkpointing", "a shorter sequence", "more ranks"]
    if best.microbatch_size > 1:
        remedies.insert(0, "smaller microbatches")
    return text + f"{', '.join(remedies[:-1]).capitalize()} or {remedies[-1]} would help"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
