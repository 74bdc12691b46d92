from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from pp_schedule import build_pipeline_schedule, measured_costs, record


@pytest.fixture
def schedule(one_rank: None) -> Any:
    stages = [
        PipelineStage(torch.nn.Linear(3, 3), index, 2, torch.device("cpu")) for index in range(2)
    ]
    return build_pipeline_schedule(None, "interleaved_1f1b", 2, 8, stages, mse_loss)


def step(schedule: Any) -> None:
    schedule.step(torch.randn(8, 3), target=torch.randn(8, 3))


def test_one_rank(schedule: Any) -> None:
    with record(schedule) as recording:
        step(schedule)
    timeline = recording.timeline()
    assert len(timeline.spans) == 2 * 2 * 4
    assert recording.clock_error == 0.0  # one clock
    assert timeline.transfers == ()
    assert all(time > 0 for time in measured_costs(timeline).forward)


def test_an_error_in_the_block_ends_the_recording(schedule: Any) -> None:
    before = [set(vars(x)) for x in (schedule, *schedule._stages)]
    schedule._loss_fn = lambda output, target: output[10]  # there are two rows
    with pytest.raises(IndexError), record(schedule):
        step(schedule)
    assert [set(vars(x)) for x in (schedule, *schedule._stages)] == before


def test_a_recording_within_a_recording(schedule: Any) -> None:
    with record(schedule) as outer:
        step(schedule)
        with record(schedule) as inner:
            step(schedule)
    assert len(inner.timeline().spans) == 16
    assert outer.timeline(0).spans != outer.timeline(1).spans
    # What is put in place later is called first.
    pairs = zip(outer.timeline(1).spans, inner.timeline().spans, strict=True)
    assert all(early.end - early.start <= late.end - late.start for early, late in pairs)


def test_what_others_put_in_place_meanwhile_stays(schedule: Any) -> None:
    stage = schedule._stages[0]
    with record(schedule):
        theirs = stage.forward_one_chunk = lambda *a, **k: None
    assert stage.forward_one_chunk is theirs


def test_nothing_recorded(schedule: Any) -> None:
    with record(schedule) as recording:
        pass
    with pytest.raises(ValueError, match=r"at least one, .* recorded \[0\]"):
        recording.timeline()
