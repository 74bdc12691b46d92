"""Orders: which action each rank runs after which. Arithmetic only.

An order maps each pipeline rank to its list of actions. `None` is a deliberate idle step.
Actions are written as torch writes them in a schedule CSV: `2F5` is the forward of microbatch 5
on stage 2; `B` is a full backward, `I` its input half and `W` its weight half.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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


def load_csv(path: str | Path) -> Order:
    """Read a compute-only schedule CSV: one row per rank, one action per cell.

    Raises:
        ValueError: Naming the row and column of every cell that is no action.
    """
    order: dict[int, list[Action | None]] = {}
    problems = []
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file) if row]  # an empty line is no rank
        for rank, row in enumerate(rows):
            order[rank] = []
            for column, cell in enumerate(row):
                try:
                    order[rank].append(parse_action(cell))
                except ValueError as error:
                    problems.append(f"row {rank}, column {column}: {error}")
    if not order:
        problems.append("the file is empty")
    if problems:
        raise ValueError(f"{path} is no compute-only schedule: " + "; ".join(problems))
    return order


def dump_csv(order: Order, path: str | Path) -> None:
    """Write an order as a compute-only schedule CSV that torch and `load_csv` read."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for rank in sorted(order):
            writer.writerow(["" if action is None else str(action) for action in order[rank]])


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
            kinds = {kind for kind in "FBIW" if Action(stage, kind, m) in where}
            if "F" not in kinds:
                problems.append(f"{stage}F{m} is missing")
            if kinds - {"F"} not in ({"B"}, {"I", "W"}):
                has = ", ".join(f"{stage}{kind}{m}" for kind in sorted(kinds - {"F"})) or "nothing"
                problems.append(
                    f"stage {stage}, microbatch {m} needs {stage}B{m} or both {stage}I{m} and "
                    f"{stage}W{m}, and has {has}"
                )
    return problems


def _stuck_ranks(order: Order, num_stages: int) -> list[tuple[int, int, Action, Action]]:
    """Run the order without a clock; return where each rank stops, if not at its end."""
    everything = {action for actions in order.values() for action in actions if action is not None}
    done: set[Action] = set()
    position = dict.fromkeys(order, 0)

    def needed(action: Action) -> Action | None:
        split = Action(action.stage_index + 1, "I", action.microbatch) in everything
        before = required_before(action, num_stages, split)
        return next((b for b in before if b not in done), None)

    moved = True
    while moved:
        moved = False
        for rank, actions in order.items():
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if action is not None:
                    if needed(action) is not None:
                        break
                    done.add(action)
                position[rank] += 1
                moved = True
    stuck = []
    for rank, actions in order.items():
        if position[rank] < len(actions):
            action = actions[position[rank]]
            assert action is not None
            missing = needed(action)
            assert missing is not None
            stuck.append((rank, position[rank], action, missing))
    return stuck
