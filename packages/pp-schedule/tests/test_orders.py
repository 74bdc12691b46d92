import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pp_schedule import (
    SCHEDULE_NAMES,
    Action,
    build_pipeline_schedule,
    dump_csv,
    load_csv,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
    validate_order,
)
from pp_schedule.orders import (
    Order,
    breadth_first_order,
    gpipe_order,
    one_f_one_b_order,
    parse_action,
)


def read(*rows: str) -> dict[int, list[Action | None]]:
    """An order from rows such as "0F0 . 0B0", in which a dot is an idle step."""
    return {
        rank: [parse_action(cell.replace(".", "")) for cell in row.split()]
        for rank, row in enumerate(rows)
    }


def named_order(
    name: str, fake_stages: Callable[..., list[Any]], pp_size: int, num_microbatches: int
) -> tuple[Order, int]:
    """The order of a schedule: as torch made it, but of "auto", which torch has not."""
    spec = resolve_schedule(name)
    num_stages = pp_size * (spec.stages_per_rank or 2)
    ids = stage_ids_this_rank(0, pp_size, num_stages, spec.style)
    stages = fake_stages(0, pp_size, ids, num_stages)
    if name == "auto":
        schedule = build_pipeline_schedule(None, name, 1, num_microbatches, stages, None)
    else:
        schedule = spec.cls(stages[0] if spec.single_stage else stages, num_microbatches)
    return schedule_order(schedule), num_stages


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("pp_size", "num_microbatches"), [(1, 2), (2, 4), (4, 8), (4, 12)])
def test_named_schedules_are_valid_and_survive_a_csv(
    name: str,
    pp_size: int,
    num_microbatches: int,
    fake_stages: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    order, num_stages = named_order(name, fake_stages, pp_size, num_microbatches)
    assert validate_order(order, num_stages, num_microbatches) == []
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    assert load_csv(path) == {rank: list(row) for rank, row in order.items()}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_named_schedule_has_the_placement_it_claims(
    name: str, fake_stages: Callable[..., list[Any]]
) -> None:
    order, num_stages = named_order(name, fake_stages, 4, 8)
    for rank, row in order.items():
        ids = {action.stage_index for action in row if action is not None}
        assert ids == set(stage_ids_this_rank(rank, 4, num_stages, resolve_schedule(name).style))
    splits = any(a.kind in "IW" for row in order.values() for a in row if a is not None)
    assert splits == resolve_schedule(name).splits_backward


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_our_own_orders_are_valid(num_stages: int, num_microbatches: int) -> None:
    orders = [
        gpipe_order(num_stages, num_microbatches),
        one_f_one_b_order(num_stages, num_microbatches),
        breadth_first_order({r: [r] for r in range(num_stages)}, num_microbatches),
    ]
    for order in orders:
        assert validate_order(order, num_stages, num_microbatches) == []
    folded = {r: stage_ids_this_rank(r, num_stages, 2 * num_stages, "v") for r in range(num_stages)}
    order = breadth_first_order(folded, num_microbatches)
    assert validate_order(order, 2 * num_stages, num_microbatches) == []


def test_1f1b_by_hand() -> None:
    assert one_f_one_b_order(2, 3) == read("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")


def test_1f1b_never_holds_more_than_the_stages_that_lie_ahead() -> None:
    for stage, row in one_f_one_b_order(4, 10).items():
        held = itertools.accumulate(1 if action.kind == "F" else -1 for action in row if action)
        assert max(held) == 4 - stage


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        (GOOD, []),
        (("0F0 0F1 . . 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W1 1W0"), []),
        (("0F0 0F1 0B0", GOOD[1]), ["stage 0, microbatch 1 needs 0B1 or both 0I1 and 0W1"]),
        (("0F0 0F1 0B0 0I1", GOOD[1]), ["needs 0B1 or both 0I1 and 0W1, and has 0I1"]),
        (("0F0 0F1 0B0 0B1 0W1", GOOD[1]), ["and has 0B1, 0W1"]),
        (("0F1 0B0 0B1", GOOD[1]), ["0F0 is missing"]),
        (("0F0 0F1 0F0 0B0 0B1", GOOD[1]), ["0F0 (rank 0, action 2): repeats rank 0, action 0"]),
        (("0F0 0F1 0B0 0B1 1F0", GOOD[1]), ["1F0 (rank 1, action 0): repeats rank 0, action 4"]),
        (
            ("0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1"),
            ["1F0 (rank 1, action 0): stage 1 runs on rank 0"],
        ),
        ((*GOOD, "2F0"), ["2F0 (rank 2, action 0): there are stages 0..1 only"]),
        (("0F0 0F1 0B0 0B1 0F2", GOOD[1]), ["0F2 (rank 0, action 4): there are microbatches 0..1"]),
        (("0B0 0F0 0F1 0B1", GOOD[1]), ["0B0 (rank 0, action 0) waits for ever for 0F0"]),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            [
                "0B0 (rank 0, action 1) waits for ever for 1B0",
                "1F1 (rank 1, action 1) waits for ever for 0F1",
            ],
        ),
        (("0F0 0F1 0W0 0I0 0B1", GOOD[1]), ["0W0 (rank 0, action 2) waits for ever for 0I0"]),
        # torch takes the losses and outputs of the last stage in the order in which they come.
        (
            ("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0"),
            ["stage 1 runs its forwards in the order [1, 0]"],
        ),
        (("0F1 0F0 0B1 0B0", "1F0 1F1 1B1 1B0"), []),  # it alone has to
        # An idle step does not resolve anything.
        (("0F0 . 0B0 . 0F1 0B1", "1F0 1F1 1B0 1B1"), ["0B0 (rank 0, action 2) waits for ever"]),
        # A whole backward needs the input half of a split one, not its weight half.
        (("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1"), []),
        (("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"), ["1W0 (rank 1, action 1) waits for ever"]),
    ],
)
def test_validate_order(rows: tuple[str, ...], problems: list[str]) -> None:
    found = validate_order(read(*rows), 2, 2)
    assert bool(found) == bool(problems)
    for problem in problems:
        assert any(problem in each for each in found), found


def test_ranks_without_a_gap() -> None:
    order = read(*GOOD)
    order[3] = order.pop(1)
    [problem] = validate_order(order, 2, 2)
    assert "not [0, 3]" in problem


def test_every_action_that_is_left_out_is_found() -> None:
    order = one_f_one_b_order(3, 4)
    for rank, row in order.items():
        for step in range(len(row)):
            shorter = {**order, rank: [*row[:step], *row[step + 1 :]]}
            [problem] = validate_order(shorter, 3, 4)
            assert str(row[step]) in problem


def test_any_swap_of_neighbours_runs_or_is_found() -> None:
    """A swap that crosses the row's own needs must be found; what passes must end."""
    order = one_f_one_b_order(3, 3)
    for rank, row in order.items():
        for step in range(len(row) - 1):
            first, second = row[step], row[step + 1]
            assert first is not None
            assert second is not None
            swapped = {**order, rank: [*row[:step], second, first, *row[step + 2 :]]}
            problems = validate_order(swapped, 3, 3)
            if (first.kind, second.kind) == ("F", "B") and first.microbatch == second.microbatch:
                assert any(f"waits for ever for {first}" in problem for problem in problems)
            assert bool(problems) != ends(swapped, 3)


def ends(order: Order, num_stages: int) -> bool:
    """Whether an order comes to its end, told by trying rank after rank, one action at a time."""
    rows = {rank: [action for action in row if action] for rank, row in order.items()}
    done: set[tuple[int, str, int]] = set()
    while True:
        ready = []
        for rank, row in rows.items():
            if not row:
                continue
            stage, kind, m = row[0]
            neighbour = stage - 1 if kind == "F" else stage + 1
            here = kind == "F" or (stage, "F", m) in done
            if here and (not 0 <= neighbour < num_stages or (neighbour, kind, m) in done):
                ready.append(rank)
        if not ready:
            return not any(rows.values())
        for rank in ready:
            done.add(tuple(rows[rank].pop(0)))


def test_csv_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n, 1F0 ,1I0,1W0,1F1,1B1\n")
    order = load_csv(path)
    assert order == read("0F0 0F1 . 0B0 0B1", ". 1F0 1I0 1W0 1F1 1B1")
    assert order[0][2] is None
    assert order[1][1] == Action(1, "F", 0)
    dump_csv(order, path)
    assert path.read_text().splitlines() == ["0F0,0F1,,0B0,0B1", ",1F0,1I0,1W0,1F1,1B1"]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv", "dualpipev"])
def test_torch_reads_our_csv(
    name: str, fake_stages: Callable[..., list[Any]], tmp_path: Path
) -> None:
    from torch.distributed.pipelining.schedules import _Action

    order, _ = named_order(name, fake_stages, 4, 8)
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    for row, line in zip(order.values(), path.read_text().splitlines(), strict=True):
        for action, cell in zip(row, line.split(","), strict=True):
            theirs = _Action.from_str(cell)
            assert (theirs is None) == (action is None)
            assert theirs is None or repr(theirs) == str(action)


@pytest.mark.parametrize("cell", ["F0", "0F", "0G0", "0f0", "0F0 0F1", "-1F0", "0F0x"])
def test_junk_cells_are_named(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(f"0F0,0B0\n1F0,{cell}\n{cell},2B0\n")
    with pytest.raises(ValueError, match="is no schedule") as caught:
        load_csv(path)
    assert f"row 1, column 1: {cell!r}" in str(caught.value)
    assert f"row 2, column 0: {cell!r}" in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        load_csv(path)
    with pytest.raises(FileNotFoundError):
        load_csv(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "module",
    [
        "balancing",
        "costs",
        "draw",
        "interleaved_orders",
        "lowering",
        "names",
        "orders",
        "placement",
        "program_check",
        "schedule_csv",
        "simulator",
        "v_orders",
        "zero_bubble_orders",
    ],
)
def test_arithmetic_imports_no_torch(module: str) -> None:
    code = f"import sys, pp_schedule.{module}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_arithmetic_from_the_package_itself_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from pp_schedule import Action, StageCosts, calculate_virtual_stages, draw_text, dump_csv\n"
        "from pp_schedule import load_csv, resolve_schedule, simulate, stage_ids_this_rank\n"
        "resolve_schedule('1f1b')\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
