"""Orders: which action each rank runs after which. Arithmetic only.

An order maps each pipeline rank to its list of actions. `None` is a deliberate idle step.
Actions are written as torch writes them in a schedule CSV: `2F5` is the forward of microbatch 5
on stage 2; `B` is a full backward, `I` its input half and `W` its weight half.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One piece of work on one stage for one microbatch."""

    stage_index: int
    """Global stage index."""
    kind: str
    """`F`, `B`, `I` or `W`."""
    microbatch: int
    """Microbatch index, from 0."""

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind}{self.microbatch}"


Order = Mapping[int, Sequence[Action | None]]


def parse_action(text: str) -> Action | None:
    """Read one CSV cell; an empty cell is an idle step.

    Raises:
        ValueError: If the cell is not an action, trailing characters included.
    """
    if not text.strip():
        return None
    match = re.fullmatch(r"\s*(\d+)([FBIW])(\d+)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 0F0, 1B3, 2I0 or 2W0")
    return Action(int(match[1]), match[2], int(match[3]))


def gpipe_order(num_stages: int, num_microbatches: int) -> Order:
    """All forwards, then all backwards; one stage per rank."""
    return {
        stage: [Action(stage, kind, m) for kind in "FB" for m in range(num_microbatches)]
        for stage in range(num_stages)
    }


def one_f_one_b_order(num_stages: int, num_microbatches: int) -> Order:
    """Warm up with as many forwards as stages lie ahead, then alternate; one stage per rank.

    torch's own `Schedule1F1B._get_pipeline_order` is wrong on the last rank (2.13 to 2.15), so
    the order is made here; it is what `Schedule1F1B` executes.
    """
    order: dict[int, list[Action | None]] = {}
    for stage in range(num_stages):
        num_warmup = min(num_microbatches, num_stages - stage)
        actions: list[Action | None] = [Action(stage, "F", m) for m in range(num_warmup)]
        for m in range(num_microbatches):
            actions.append(Action(stage, "B", m))
            if num_warmup + m < num_microbatches:
                actions.append(Action(stage, "F", num_warmup + m))
        order[stage] = actions
    return order


def breadth_first_order(stage_ids: Mapping[int, Iterable[int]], num_microbatches: int) -> Order:
    """All forwards stage by stage, then all backwards in reverse; any placement."""
    order = {}
    for rank, ids in stage_ids.items():
        stages = sorted(ids)
        order[rank] = [Action(s, "F", m) for s in stages for m in range(num_microbatches)] + [
            Action(s, "B", m) for s in reversed(stages) for m in range(num_microbatches)
        ]
    return order


def validate_order(order: Order, num_stages: int, num_microbatches: int) -> list[str]:
    """Return everything that keeps an order from running, as sentences; an empty list is a pass.

    Found: ranks that are missing, actions that are missing, doubled, unknown or on a second rank,
    orders in which ranks wait for each other for ever, and forwards of the last stage that are not
    in the order of the microbatches: torch's schedules number the losses as they are made.
    """
    problems: list[str] = []
    if sorted(order) != list(range(len(order))):
        problems.append(f"ranks must be numbered from 0 without a gap, not {sorted(order)}")
    where: dict[Action, tuple[int, int]] = {}
    rank_of_stage: dict[int, int] = {}
    for rank, actions in order.items():
        for step, action in enumerate(actions):
            if action is None:
                continue
            name = f"{action} (rank {rank}, action {step})"
            if not 0 <= action.stage_index < num_stages:
                problems.append(f"{name}: there are stages 0..{num_stages - 1} only")
            elif not 0 <= action.microbatch < num_microbatches:
                problems.append(f"{name}: there are microbatches 0..{num_microbatches - 1} only")
            elif action in where:
                first = where[action]
                problems.append(f"{name}: repeats rank {first[0]}, action {first[1]}")
            elif rank_of_stage.setdefault(action.stage_index, rank) != rank:
                other = rank_of_stage[action.stage_index]
                problems.append(f"{name}: stage {action.stage_index} runs on rank {other}")
            else:
                where[action] = (rank, step)
    problems += _missing(where, num_stages, num_microbatches)
    losses = sorted((w, a.microbatch) for a, w in where.items() if a[:2] == (num_stages - 1, "F"))
    if [m for _, m in losses] != sorted(m for _, m in losses):
        problems.append(
            f"stage {num_stages - 1} runs its forwards in the order {[m for _, m in losses]}; "
            "torch numbers losses as they are made, so the last stage must take the microbatches "
            "in order"
        )
    if not problems:
        stuck = _stuck_ranks(order, num_stages)
        problems += [
            f"{action} (rank {rank}, action {step}) waits for ever for {needed}"
            for rank, step, action, needed in stuck
        ]
    return problems


def required_before(action: Action, num_stages: int, split: bool) -> list[Action]:
    """Return what must have run before `action`; `split` says its next stage splits backwards."""
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage > 0 else []
    if kind == "W":
        return [Action(stage, "I", m)]
    after = [Action(stage + 1, "I" if split else "B", m)] if stage < num_stages - 1 else []
    return [Action(stage, "F", m), *after]


def _missing(where: Mapping[Action, object], num_stages: int, num_microbatches: int) -> list[str]:
    problems = []
    for stage in range(num_stages):
        for m in range(num_microbatches):
            kinds = [kind for kind in "FBIW" if (stage, kind, m) in where]
            if kinds in (["F", "B"], ["F", "I", "W"]):
                continue
            if "F" not in kinds:
                problems.append(f"{stage}F{m} is missing")
            backwards = [kind for kind in kinds if kind != "F"]
            if backwards not in (["B"], ["I", "W"]):
                has = ", ".join(f"{stage}{kind}{m}" for kind in backwards) or "nothing"
                problems.append(
                    f"stage {stage}, microbatch {m} needs {stage}B{m} or both {stage}I{m} and "
                    f"{stage}W{m}, and has {has}"
                )
    return problems


def _stuck_ranks(order: Order, num_stages: int) -> list[tuple[int, int, Action, Action]]:
    """Run the order without a clock; return where each rank stops, if not at its end."""
    forwarded: set[tuple[int, int]] = set()
    returned: set[tuple[int, int]] = set()
    position = dict.fromkeys(order, 0)

    def runs(action: Action) -> bool:
        stage, kind, m = action
        if kind == "F":
            if stage > 0 and (stage - 1, m) not in forwarded:
                return False
            forwarded.add((stage, m))
            return True
        if kind == "W":
            return (stage, m) in returned
        after = stage == num_stages - 1 or (stage + 1, m) in returned
        if not after or (stage, m) not in forwarded:
            return False
        returned.add((stage, m))
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in order.items():
            start = step = position[rank]
            while step < len(actions):
                action = actions[step]
                if action is not None and not runs(action):
                    break
                step += 1
            position[rank] = step
            moved = moved or step > start
    return [
        (rank, step, *_what_it_needs(order, num_stages, rank, step, forwarded, returned))
        for rank, step in position.items()
        if step < len(order[rank])
    ]


def _what_it_needs(
    order: Order,
    num_stages: int,
    rank: int,
    step: int,
    forwarded: Collection[tuple[int, int]],
    returned: Collection[tuple[int, int]],
) -> tuple[Action, Action]:
    """Return the action at which a rank is stuck, and the first that it waits for."""
    action = order[rank][step]
    assert action is not None
    stage, _, m = action
    split = any(Action(stage + 1, "I", m) in actions for actions in order.values())
    for before in required_before(action, num_stages, split):
        if (before.stage_index, m) not in (forwarded if before.kind == "F" else returned):
            return action, before
    raise AssertionError(f"{action} has all it needs")
