from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pp_schedule import (
    SCHEDULE_NAMES,
    Order,
    build_pipeline_schedule,
    dump_csv,
    load_csv,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)
from pp_schedule.lowering import Dialect, Instruction, computations, lower
from pp_schedule.orders import one_f_one_b_order
from pp_schedule.program_check import validate_program
from pp_schedule.schedule_csv import parse_cell


def built(name: str, fake_stages: Callable[..., list[Any]], pp_size: int, microbatches: int) -> Any:
    spec = resolve_schedule(name)
    num_stages = pp_size * (spec.stages_per_rank or 2)
    ids = stage_ids_this_rank(0, pp_size, num_stages, spec.style)
    stages = fake_stages(0, pp_size, ids, num_stages)
    return build_pipeline_schedule(None, name, 1, microbatches, stages, None)


def compact(order: Order) -> Order:
    return {rank: [action for action in row if action] for rank, row in order.items()}


def program(num_stages: int = 2, microbatches: int = 2, dialect: Dialect = "2.15") -> Any:
    """1F1B's, as rows of cells."""
    steps = lower(
        computations(one_f_one_b_order(num_stages, microbatches)),
        microbatches,
        dialect,
        Instruction,
    )
    return {rank: [str(step) for step in row] for rank, row in steps.items()}


def write(path: Path, rows: dict[int, list[str]]) -> Path:
    path.write_text("\n".join(",".join(rows[rank]) for rank in sorted(rows)) + "\n")
    return path


def problems_of(rows: dict[int, list[str]]) -> list[str]:
    return validate_program(
        {rank: [step for cell in row for step in parse_cell(cell)] for rank, row in rows.items()}
    )


# --- what is read and written


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("pp_size", "microbatches"), [(1, 2), (2, 4), (4, 8), (4, 12)])
def test_round_trip(
    name: str,
    pp_size: int,
    microbatches: int,
    fake_stages: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    order = schedule_order(built(name, fake_stages, pp_size, microbatches))
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    assert load_csv(path) == {rank: list(row) for rank, row in order.items()}
    dump_csv(order, path, with_communication=True)
    assert load_csv(path) == compact(order)
    for dialect in ("2.13", "2.15"):
        steps = lower(computations(order), microbatches, dialect, Instruction)
        write(path, {rank: [str(step) for step in row] for rank, row in steps.items()})
        assert load_csv(path) == compact(order)


@pytest.mark.parametrize("name", ["looped_bfs", "dfs", "zero_bubble", "zbv", "dualpipev"])
def test_torch_reads_our_files_and_we_read_torchs(
    name: str, fake_stages: Callable[..., list[Any]], tmp_path: Path
) -> None:
    schedule = built(name, fake_stages, 4, 8)
    order = schedule_order(schedule)
    path = tmp_path / "order.csv"
    for content in ("compute_only", "compute_comms"):
        schedule._dump_csv(str(path), format=content)
        assert compact(load_csv(path)) == compact(order)
    dump_csv(order, path)
    lowered = build_pipeline_schedule(str(path), None, 1, 8, schedule._stages, None)
    dump_csv(order, path, with_communication=True)
    theirs = _PipelineScheduleRuntime(schedule._stages, 8)
    theirs._load_csv(str(path), format="compute_comms")
    assert theirs.pipeline_order_with_comms == lowered.pipeline_order_with_comms
    ours = build_pipeline_schedule(str(path), None, 1, 8, schedule._stages, None)
    assert ours.pipeline_order_with_comms == lowered.pipeline_order_with_comms


@pytest.mark.parametrize(
    ("cell", "steps"),
    [
        ("", [None]),
        ("  ", [None]),
        (" 10B12 ", [Instruction(10, "B", 12)]),
        ("3SEND_F4", [Instruction(3, "SEND_F", 4)]),
        ("3WAIT_SEND_B4", [Instruction(3, "WAIT_SEND_B", 4)]),
        ("3UNSHARD", [Instruction(3, "UNSHARD")]),
        ("3WAIT_REDUCE_GRAD", [Instruction(3, "WAIT_REDUCE_GRAD")]),
        ("(0F4;7B1)OVERLAP_F_B", [Instruction(0, "F", 4), Instruction(7, "B", 1)]),
    ],
)
def test_cells(cell: str, steps: list[Instruction | None]) -> None:
    assert parse_cell(cell) == steps


@pytest.mark.parametrize(
    "cell",
    [
        *("0SEND_F", "0UNSHARD0", "0SEND_F0x", "0WAIT_RECV_F0", "0WAIT_UNSHARD", "0OVERLAP_F_B"),
        *("(0F4;7I1)OVERLAP_F_B", "(7B1;0F4)OVERLAP_F_B", "(0F4)OVERLAP_F_B", "(0F4;7B1)"),
        *("(0F4;7B1)OVERLAP_F_B0", "SEND_F0", "0SEND_F0 0F1"),
    ],
)
def test_junk_among_communication_is_named(cell: str, tmp_path: Path) -> None:
    rows = program()
    rows[1][3] = cell
    path = write(tmp_path / "order.csv", rows)
    with pytest.raises(ValueError, match="is no schedule") as caught:
        load_csv(path)
    assert f"row 1, column 3: {cell!r}" in str(caught.value)


def test_a_file_that_a_spreadsheet_has_saved(tmp_path: Path) -> None:
    order = one_f_one_b_order(2, 3)
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n")
    assert load_csv(path) == order


# --- what is refused


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_bytes(b"0F0,\xff\xfe\n")
    with pytest.raises(ValueError, match=r"order\.csv is no schedule: .*utf-8"):
        load_csv(path)


@pytest.mark.parametrize("dialect", ["2.13", "2.15"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_whatever_is_left_out_is_found(num_stages: int, dialect: Dialect) -> None:
    rows = program(num_stages, 4, dialect)
    assert problems_of(rows) == []
    for rank, row in rows.items():
        for index, cell in enumerate(row):
            shorter = {**rows, rank: row[:index] + row[index + 1 :]}
            assert any(cell in problem for problem in problems_of(shorter)), cell


def test_whatever_is_doubled_is_found() -> None:
    rows = program(2, 3)
    for rank, row in rows.items():
        for index, cell in enumerate(row):
            longer = {**rows, rank: [*row[:index], cell, *row[index:]]}
            problems = problems_of(longer)
            assert any(f"{cell} (rank {rank}" in problem for problem in problems), cell


def test_whatever_is_on_another_rank_is_found() -> None:
    rows = program(2, 2)
    for index, cell in enumerate(rows[0]):
        moved = {0: rows[0][:index] + rows[0][index + 1 :], 1: [*rows[1], cell]}
        if cell[1] not in "FB":
            assert any(
                f"{cell} (rank 1, action {len(rows[1])}): stage 0 runs on rank 0" in problem
                for problem in problems_of(moved)
            )
        else:
            assert problems_of(moved)


@pytest.mark.parametrize(
    ("rank", "before", "after", "words"),
    [
        # Messages are told apart by their order alone: the gradients would be wrong in silence.
        (
            0,
            "0F1 0SEND_F1",
            "0F1",
            ["0SEND_F1 is missing after 0F1 (rank 0, action 3), so 1F1 (rank 1, action"],
        ),
        (0, "0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0", [
            "0SEND_F1 (rank 0, action 3) arrives at 1RECV_F0 (rank 1, action 1), which is for "
            "0SEND_F0: rank 1 must receive in the order in which rank 0 sends"
        ]),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", ["sends what 0F0 (rank 0, action 2) makes later"]),
        (1, "1RECV_F0 1F0", "1F0 1RECV_F0", ["1RECV_F0 (rank 1, action 2) comes after 1F0"]),
        (1, "1UNSHARD 1RECV_F0", "1RECV_F0", ["1F0 (rank 1, action 1): no 1UNSHARD before it"]),
        (1, "1REDUCE_GRAD 1WAIT_REDUCE_GRAD", "1WAIT_REDUCE_GRAD 1REDUCE_GRAD", [
            "1WAIT_REDUCE_GRAD (rank 1, action 9): no 1REDUCE_GRAD before it"
        ]),
        (1, "1B1 1SEND_B1 1REDUCE_GRAD", "1REDUCE_GRAD 1B1 1SEND_B1", [
            "1REDUCE_GRAD (rank 1, action 7) comes before 1B1 (rank 1, action 8)"
        ]),
        (0, "0F0", "0F0 0RECV_F0", ["0RECV_F0 (rank 0, action 2): there is no stage -1"]),
        (0, "0F0", "0F0 0SEND_F7", ["0SEND_F7 (rank 0, action 2): there is no microbatch 7"]),
        (0, "0F0", "0F0 5SEND_F0", ["5SEND_F0 (rank 0, action 2): there are stages 0..1 only"]),
        (0, "0B0", "0F0", ["0F0 (rank 0, action 6): repeats rank 0, action 1", "needs 0B0"]),
        # A send that waits for a receive, which waits for a send of the same rank.
        (0, "0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 0WAIT_SEND_F1",
         "0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0WAIT_SEND_F1", []),
    ],
)  # fmt: skip
def test_rows_that_are_wrong(rank: int, before: str, after: str, words: list[str]) -> None:
    rows = program()
    line = " ".join(rows[rank])
    assert before in line
    rows[rank] = line.replace(before, after, 1).split()
    problems = problems_of(rows)
    assert bool(problems) == bool(words)
    for word in words:
        assert any(word in problem for problem in problems), problems


def test_ranks_that_wait_for_each_others_receives() -> None:
    rows = program(2, 2)
    rows[0] = [
        "0UNSHARD",
        "0F0",
        "0SEND_F0",
        "0WAIT_SEND_F0",
        "0F1",
        "0SEND_F1",
        "0WAIT_SEND_F1",
        "0RECV_B0",
        "0B0",
        "0RECV_B1",
        "0B1",
        "0REDUCE_GRAD",
        "0WAIT_REDUCE_GRAD",
        "0RESHARD",
    ]
    rows[1] = [
        "1UNSHARD",
        "1RECV_F0",
        "1F0",
        "1B0",
        "1SEND_B0",
        "1WAIT_SEND_B0",
        "1RECV_F1",
        "1F1",
        "1B1",
        "1SEND_B1",
        "1WAIT_SEND_B1",
        "1REDUCE_GRAD",
        "1WAIT_REDUCE_GRAD",
        "1RESHARD",
    ]
    assert problems_of(rows) == [
        "0WAIT_SEND_F1 (rank 0, action 6) waits for ever for 1RECV_F1 (rank 1, action 6)",
        "1WAIT_SEND_B0 (rank 1, action 5) waits for ever for 0RECV_B0 (rank 0, action 7)",
    ]


def test_a_file_that_is_wrong_throughout_is_told_in_few_words(tmp_path: Path) -> None:
    path = write(tmp_path / "order.csv", {0: ["junk"] * 500})
    with pytest.raises(ValueError, match="and 490 more") as caught:
        load_csv(path)
    assert len(str(caught.value)) < 2000


def test_stages_that_are_not_sharded_need_no_gathering() -> None:
    rows = {rank: [c for c in row if "SHARD" not in c] for rank, row in program().items()}
    assert problems_of(rows) == []


def test_a_number_of_microbatches_that_is_not_the_config_s(
    fake_stages: Callable[..., list[Any]], tmp_path: Path
) -> None:
    path = tmp_path / "order.csv"
    dump_csv(one_f_one_b_order(2, 8), path, with_communication=True)
    stages = fake_stages(0, 2, (0,), 2)
    with pytest.raises(
        ValueError, match="8 microbatches, but local_batch_size / microbatch_size is 4"
    ):
        build_pipeline_schedule(str(path), None, 2, 8, stages, None)
