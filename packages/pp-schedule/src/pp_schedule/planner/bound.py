"""What no order can beat. No torch."""

from collections.abc import Mapping, Sequence

from pp_schedule.stage_costs import StageCosts


def lower_bound(
    stage_ids: Mapping[int, Sequence[int]], costs: StageCosts, num_microbatches: int
) -> float:
    """Return a time that no order of these stages is faster than, with whatever memory.

    A rank starts when the first microbatch has reached it and then has all its work to do. What
    may come after its last input half are weight halves, while the gradient travels on to stage 0.

    Args:
        stage_ids: The stages of every rank.
        costs: Times and bytes per stage.
        num_microbatches: Microbatches per step.
    """
    num_stages = sum(map(len, stage_ids.values()))
    time = costs.durations(num_stages)
    rank_of = {stage: rank for rank, ids in stage_ids.items() for stage in ids}
    latency, size, speed = (
        costs.per_stage(name, num_stages) for name in ("latency", "boundary_bytes", "bandwidth")
    )
    travel = [
        latency[s] + size[s] / speed[s] if rank_of[s] != rank_of[s + 1] else 0.0
        for s in range(num_stages - 1)
    ]
    backward = [min(b, i + w) for b, i, w in zip(time["B"], time["I"], time["W"], strict=True)]
    onward = [min(b, i) for b, i in zip(time["B"], time["I"], strict=True)]
    onward[0] = backward[0]  # which is all that ends the step there
    bound = sum(time["F"]) + sum(onward) + 2 * sum(travel)  # the way of one microbatch
    for stages in stage_ids.values():
        entry = min(stages)
        before = sum(time["F"][:entry]) + sum(travel[:entry])
        after = sum(onward[:entry]) + sum(travel[:entry])
        busy = num_microbatches * sum(time["F"][s] + backward[s] for s in stages)
        needed = num_microbatches * sum(time["F"][s] + onward[s] for s in stages)
        bound = max(bound, before + busy, before + needed + after)
    return bound
