from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pp_schedule import (
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
    validate_order,
)
from pp_schedule.lowering import Instruction, computations, lower
from pp_schedule.orders import one_f_one_b_order

RUNTIME_NAMES = (
    "looped_bfs",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
)
# Microbatches of which some fill the last round and some do not.
SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 6, 8, 9, 12)]


def stages_of_rank(
    name: str, fake_stages: Callable[..., list[Any]], pp_size: int, per_rank: int
) -> list[Any]:
    style = resolve_schedule(name).style
    rank, num_stages = pp_size - 1, pp_size * per_rank
    ids = stage_ids_this_rank(rank, pp_size, num_stages, style)
    return fake_stages(rank, pp_size, ids, num_stages)


def apart(row: list[Any]) -> list[Any]:
    return [part for a in row for part in (a.sub_actions if a and a.sub_actions else (a,))]


@pytest.mark.parametrize("name", RUNTIME_NAMES)
def test_what_runs_is_what_torch_makes(name: str, fake_stages: Callable[..., list[Any]]) -> None:
    spec = resolve_schedule(name)
    for pp_size, num_microbatches in SIZES:
        for per_rank in [spec.stages_per_rank] if spec.stages_per_rank else (1, 2, 3, 4, 5):
            if spec.check(pp_size, pp_size * per_rank, num_microbatches):
                continue
            stages = stages_of_rank(name, fake_stages, pp_size, per_rank)
            theirs = spec.cls(stages, num_microbatches)
            ours = build_pipeline_schedule(None, name, 1, num_microbatches, stages, None)
            assert type(ours) is type(theirs)
            assert vars(ours).keys() - vars(theirs).keys() == {"_initialize_pp_stages"}
            assert ours.pipeline_order == theirs.pipeline_order
            if name == "dualpipev":  # its pairs are taken apart, then lowered as torch does it
                theirs._prepare_schedule_with_comms(
                    {rank: apart(row) for rank, row in theirs.pipeline_order.items()}
                )
            assert ours.pipeline_order_with_comms == theirs.pipeline_order_with_comms
            assert ours.stage_index_to_group_rank == theirs.stage_index_to_group_rank


@pytest.mark.parametrize("name", RUNTIME_NAMES)
def test_an_order_runs_as_torch_would_run_it(
    name: str, fake_stages: Callable[..., list[Any]], tmp_path: Path
) -> None:
    stages = stages_of_rank(name, fake_stages, 3, 2)
    order = schedule_order(build_pipeline_schedule(None, name, 1, 6, stages, None))
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    ours = build_pipeline_schedule(str(path), None, 1, 6, stages, None)
    theirs = _PipelineScheduleRuntime(stages, 6)
    theirs._load_csv(str(path), format="compute_only")
    assert ours.pipeline_order == theirs.pipeline_order
    assert ours.pipeline_order_with_comms == theirs.pipeline_order_with_comms


def test_a_program_by_hand() -> None:
    compute = computations(one_f_one_b_order(2, 2))
    rows = {
        dialect: {
            r: " ".join(map(str, row)) for r, row in lower(compute, 2, dialect, Instruction).items()
        }
        for dialect in ("2.13", "2.15")
    }
    assert rows["2.13"] == {
        0: "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        1: "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD",
    }
    assert rows["2.15"] == {
        0: "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 "
        "0WAIT_SEND_F1 0REDUCE_GRAD 0WAIT_REDUCE_GRAD 0RESHARD",
        1: "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD "
        "1WAIT_REDUCE_GRAD 1RESHARD 1WAIT_SEND_B0 1WAIT_SEND_B1",
    }


def test_ranks_that_wait_for_each_other() -> None:
    steps = {0: "0F0 0B0 0F1 0B1", 1: "1F0 1F1 1B0 1B1"}
    compute = {
        rank: [Instruction(int(s[0]), s[1], int(s[2])) for s in row.split()]
        for rank, row in steps.items()
    }
    with pytest.raises(ValueError, match="wait for each other for ever: rank 0 at 0B0, rank 1 at"):
        lower(compute, 2, "2.15", Instruction)


@pytest.mark.parametrize("name", RUNTIME_NAMES)
def test_twice_the_microbatches_are_twice_the_work(
    name: str, fake_stages: Callable[..., list[Any]], work_of: Callable[..., Any], tmp_path: Path
) -> None:
    stages = stages_of_rank(name, fake_stages, 4, 2)
    work: dict[str, list[int]] = {"build": [], "check": [], "False": [], "True": []}
    for number in (32, 64):
        lines, schedule = work_of(build_pipeline_schedule, None, name, 1, number, stages, None)
        work["build"].append(lines)
        order = schedule_order(schedule)
        lines, problems = work_of(validate_order, order, 8, number)
        work["check"].append(lines)
        assert not problems
        for with_communication in (False, True):
            path = tmp_path / f"{number}-{with_communication}.csv"
            dump_csv(order, path, with_communication)
            lines, _ = work_of(build_pipeline_schedule, str(path), None, 1, number, stages, None)
            work[str(with_communication)].append(lines)
    for what, (once, twice) in work.items():
        assert twice < 2.2 * once, what  # of quadratic work it were four times


@pytest.mark.parametrize("name", RUNTIME_NAMES)
def test_64_ranks_with_256_microbatches(
    name: str, fake_stages: Callable[..., list[Any]], tmp_path: Path
) -> None:
    stages = stages_of_rank(name, fake_stages, 64, 2)
    schedule = build_pipeline_schedule(None, name, 1, 256, stages, None)
    order = schedule_order(schedule)
    assert not validate_order(order, 128, 256)
    dump_csv(order, tmp_path / "order.csv", with_communication=True)
    again = build_pipeline_schedule(str(tmp_path / "order.csv"), None, 1, 256, stages, None)
    # A file with communication has no idle steps.
    busy = {rank: [action for action in row if action] for rank, row in order.items()}
    assert schedule_order(again) == busy
