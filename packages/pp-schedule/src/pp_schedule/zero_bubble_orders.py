"""Zero-bubble orders of one stage per rank, and how weight halves are put into any order. No torch.

Each is made in two steps. A *skeleton* says in which order a rank runs its forwards and the input
halves of its backwards. Then the weight halves, which nothing waits for, are put where the rank
would idle, and earlier where a forward would exceed the memory: at most so many microbatches of a
stage may be between their forward and the end of their weight half.
"""

from collections.abc import Mapping, Sequence

from pp_schedule.orders import Action, Order

Skeleton = Mapping[int, Sequence[Action]]


def zb_h1_order(num_stages: int, num_microbatches: int) -> Order:
    """ZB-H1: 1F1B with split backwards, in 1F1B's memory; one stage per rank.

    Idle per step (num_stages - 1)(F + I - W), a third of 1F1B's where the three are equal. From
    Qi et al., "Zero Bubble Pipeline Parallelism", 2023. torch's interleaved zero bubble with one
    stage per rank is of this kind too, but wants whole rounds of microbatches.
    """
    warmups = [num_stages - stage for stage in range(num_stages)]
    return fill_weights(_one_stage_skeleton(warmups, num_microbatches), num_stages)


def zb_h2_order(num_stages: int, num_microbatches: int) -> Order:
    """ZB-H2: no idle time between a rank's first and last action; one stage per rank.

    It holds up to 2 num_stages - 1 microbatches, nearly twice 1F1B's; the first forwards take
    (num_stages - 1) F to reach the last rank. From the same paper as ZB-H1.
    """
    warmups = [2 * (num_stages - stage) - 1 for stage in range(num_stages)]
    return fill_weights(_one_stage_skeleton(warmups, num_microbatches), 2 * num_stages - 1)


def fill_weights(skeleton: Skeleton, most_held: int) -> Order:
    """Put the weight half of each backward into an order of forwards and input halves.

    In the unit of time that a forward and both halves take alike, each rank runs the next action
    of its skeleton as soon as that can run; a weight half, the oldest first, when it cannot.

    Args:
        skeleton: Forwards and input halves per rank; it must come to its end on its own.
        most_held: Microbatches that a rank's stages together may hold. Where the skeleton itself
            needs more, it gets what it needs.
    """
    num_stages = 1 + max(action.stage_index for row in skeleton.values() for action in row)
    limit = {rank: max(most_held, held_by(row)) for rank, row in skeleton.items()}
    ends: dict[Action, int] = {}
    position = dict.fromkeys(skeleton, 0)
    held = dict.fromkeys(skeleton, 0)
    waiting: dict[int, list[Action]] = {rank: [] for rank in skeleton}
    order: dict[int, list[Action | None]] = {rank: [] for rank in skeleton}
    time = 0
    while any(position[rank] < len(row) for rank, row in skeleton.items()):
        for rank, row in skeleton.items():
            action = row[position[rank]] if position[rank] < len(row) else None
            if action and not _ready(action, num_stages, ends, time):
                action = None
            if action and action.kind == "F" and held[rank] >= limit[rank]:
                action = None
            if action:
                position[rank] += 1
                ends[action] = time + 1
                if action.kind == "F":
                    held[rank] += 1
                else:
                    waiting[rank].append(action)
            elif waiting[rank]:
                stage, _, m = waiting[rank].pop(0)
                action = Action(stage, "W", m)
                held[rank] -= 1
            if action:
                order[rank].append(action)
        time += 1
    for rank, rest in waiting.items():
        order[rank] += [Action(stage, "W", m) for stage, _, m in rest]
    return order


def _ready(action: Action, num_stages: int, ends: Mapping[Action, int], time: int) -> bool:
    stage, kind, m = action
    neighbour = stage - 1 if kind == "F" else stage + 1
    if not 0 <= neighbour < num_stages:
        return kind == "F" or ends.get(Action(stage, "F", m), time + 1) <= time
    return ends.get(Action(neighbour, kind, m), time + 1) <= time


def held_by(row: Sequence[Action]) -> int:
    """The most microbatches between a forward and its input half."""
    held = most = 0
    for action in row:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def _one_stage_skeleton(warmups: Sequence[int], num_microbatches: int) -> Skeleton:
    skeleton = {}
    for stage, warmup in enumerate(warmups):
        ahead = min(warmup, num_microbatches)
        row = [Action(stage, "F", m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Action(stage, "I", m))
            if ahead + m < num_microbatches:
                row.append(Action(stage, "F", ahead + m))
        skeleton[stage] = row
    return skeleton
