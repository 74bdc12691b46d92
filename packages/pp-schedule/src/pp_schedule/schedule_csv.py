"""Schedule files in both of torch's formats: computations alone, or with their communication."""

import csv
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pp_schedule.gc_pause import gc_pause
from pp_schedule.lowering import Instruction
from pp_schedule.orders import Action, Order
from pp_schedule.program_check import COMPUTE_KINDS, validate_program

_STEP = re.compile(
    r"(\d+)(?:([FBIW]|(?:WAIT_)?SEND_[FB]|RECV_[FB])(\d+)|((?:WAIT_)?REDUCE_GRAD|UNSHARD|RESHARD))"
)
_FUSED = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def load_csv(path: str | Path) -> Order:
    """Read the order from a schedule CSV: one row per rank, one action per cell.

    Both of torch's formats are read; a cell such as `0SEND_F3` shows which one it is. A file with
    communication is checked to the last cell and then read for its computations: a schedule that is
    built from them gets its communication from the installed torch's own rules, which differ from
    release to release. A fused pair of DualPipeV is read as its two parts, as torch runs it.

    Raises:
        ValueError: Naming the row and column of every cell that is no action; of a file with
            communication, everything else that keeps it from running too.
    """
    try:
        # Spreadsheets begin a file with a mark of its encoding.
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]  # an empty line is no rank
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no schedule: {error}") from error
    with gc_pause():
        rows, problems = _parse(lines)
        steps = (step for row in rows.values() for step in row)
        with_communication = any(step and step.kind not in COMPUTE_KINDS for step in steps)
        if not problems and with_communication:
            problems = validate_program(rows)
    if problems:
        raise ValueError(f"{path} is no schedule: {first_problems(problems)}")
    return _order(rows, with_communication)


def dump_csv(order: Order, path: str | Path, with_communication: bool = False) -> None:
    """Write an order as a schedule CSV that torch and `load_csv` read.

    Args:
        order: The order of every rank.
        path: The file to write.
        with_communication: Write all that the installed torch runs for a valid order: sends,
            receives, and what FSDP needs. Idle steps are left out. torch reads such a file with
            `format="compute_comms"`, and only in the release that it was written for.
    """
    rows: Mapping[int, Sequence[Action | Instruction | None]] = order
    if with_communication:
        actions = [action for row in order.values() for action in row if action is not None]
        num_microbatches = 1 + max(action.microbatch for action in actions)
        # On first use: it imports torch.
        torch_private = import_module("pp_schedule.torch_private")
        with gc_pause():
            rows = torch_private.order_as_program(order, num_microbatches)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for rank in sorted(rows):
            writer.writerow(["" if action is None else str(action) for action in rows[rank]])


def parse_cell(text: str) -> list[Instruction | None]:
    """Read one CSV cell of either format: a step, an idle step, or the two parts of a fused one.

    Raises:
        ValueError: If the cell is not an action, trailing characters included.
    """
    plain = text.strip()
    if not plain:
        return [None]
    if match := _STEP.fullmatch(plain):
        stage, kind, microbatch, kind_of_all = match.groups()
        if kind:
            return [Instruction(int(stage), kind, int(microbatch))]
        return [Instruction(int(stage), kind_of_all)]
    if match := _FUSED.fullmatch(plain):
        parts = [step for part in match.groups() for step in parse_cell(part)]
        if [part and part.kind for part in parts] == ["F", "B"]:
            return parts
        raise ValueError(f"{text!r} does not fuse a forward and a backward, as (0F4;7B0) does")
    raise ValueError(f"{text!r} is not an action such as 0F0, 1B3, 2I0, 2W0, 1SEND_F4 or 3UNSHARD")


def first_problems(problems: Sequence[str], limit: int = 10) -> str:
    """Join problems for an error; a file that is wrong throughout has as many as it has cells."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *more])


def _parse(
    lines: Sequence[Sequence[str]],
) -> tuple[dict[int, list[Instruction | None]], list[str]]:
    rows: dict[int, list[Instruction | None]] = {}
    problems = [] if lines else ["the file is empty"]
    for rank, line in enumerate(lines):
        rows[rank] = []
        for column, cell in enumerate(line):
            try:
                rows[rank] += parse_cell(cell)
            except ValueError as error:
                problems.append(f"row {rank}, column {column}: {error}")
    return rows, problems


def _order(rows: Mapping[int, Sequence[Instruction | None]], compact: bool) -> Order:
    order: dict[int, list[Action | None]] = {}
    for rank, steps in rows.items():
        order[rank] = []
        for step in steps:
            if step is not None and step.kind in COMPUTE_KINDS:
                assert step.microbatch is not None
                order[rank].append(Action(step.stage_index, step.kind, step.microbatch))
            elif not compact:
                order[rank].append(None)
    return order
