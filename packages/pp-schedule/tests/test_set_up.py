from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from pp_schedule import (
    build_forward_only_schedule,
    build_pipeline_schedule,
    set_stage_shapes,
    use_stage_shapes,
)

Step = Callable[[Any, int], float]


class Counted(nn.Module):
    """A stage that counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.seen.add_(1)
        return torch.tanh(self.linear(x))


@pytest.fixture
def stages(one_rank: None) -> list[PipelineStage]:
    torch.manual_seed(0)
    return [PipelineStage(Counted(), index, 2, torch.device("cpu")) for index in range(2)]


def step(schedule: Any, rows: int = 4, call: str = "step") -> float:
    torch.manual_seed(7)
    x, y = torch.randn(2, rows, 3)
    losses: list[torch.Tensor] = []
    with torch.set_grad_enabled(call == "step" and torch.is_grad_enabled()):
        getattr(schedule, call)(x, target=y, losses=losses)
    assert not any(loss.requires_grad for loss in losses)
    return float(torch.stack(losses).mean())


def gradients(stages: list[PipelineStage]) -> list[torch.Tensor]:
    return [p.grad.clone() for s in stages for p in s.submod.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["looped_bfs", "zero_bubble"])
def test_training_goes_on_after_an_evaluation(stages: list[PipelineStage], name: str) -> None:
    training = build_pipeline_schedule(None, name, 1, 4, stages, mse_loss)
    evaluation = build_forward_only_schedule(stages, {0: (0, 1)}, 4, mse_loss)
    loss = step(training)
    once = gradients(stages)
    for _ in range(2):
        with torch.no_grad():
            assert step(evaluation) == pytest.approx(loss)
        assert all(map(torch.equal, gradients(stages), once))
        forwards = stages[0].submod.forwards
    step(training)
    assert stages[0].submod.forwards == forwards + 4, "shapes were found out again"
    for gradient, before in zip(gradients(stages), once, strict=True):
        torch.testing.assert_close(gradient, 2 * before)


def test_two_schedules_train_the_same_stages(stages: list[PipelineStage]) -> None:
    small = build_pipeline_schedule(None, "looped_bfs", 1, 2, stages, mse_loss)
    large = build_pipeline_schedule(None, "zero_bubble", 2, 8, stages, mse_loss)
    step(small, 2)
    [of_small, *_] = gradients(stages)
    step(large, 8)
    of_large = gradients(stages)[0] - of_small
    step(small, 2)
    step(large, 8)
    torch.testing.assert_close(gradients(stages)[0], 2 * (of_small + of_large))


def test_torchs_own_eval_finds_shapes_out_once(one_rank: None) -> None:
    stages = [PipelineStage(Counted(), 0, 1, torch.device("cpu"))]
    schedule = build_pipeline_schedule(None, "gpipe", 1, 4, stages, mse_loss)
    counts = []
    for call in ("step", "eval", "step", "eval"):
        step(schedule, call=call)
        counts.append(stages[0].submod.forwards)
    assert counts == [5, 10, 14, 18]
    twice = gradients(stages)
    step(schedule)
    for gradient, before in zip(gradients(stages), twice, strict=True):
        torch.testing.assert_close(gradient, 1.5 * before)


def test_a_trial_forward_leaves_buffers_alone(stages: list[PipelineStage]) -> None:
    schedule = build_pipeline_schedule(None, "looped_bfs", 1, 4, stages, mse_loss)
    for part in (stage.submod for stage in stages):
        assert float(part.seen) == 0
    step(schedule)
    for part in (stage.submod for stage in stages):
        assert (float(part.seen), part.forwards) == (4, 5)


def test_other_shapes_are_taken_up_after_a_switch(stages: list[PipelineStage]) -> None:
    training = build_pipeline_schedule(None, "looped_bfs", 1, 4, stages, mse_loss)
    evaluation = build_forward_only_schedule(stages, {0: (0, 1)}, 4, mse_loss)
    for length in (2, 5, 3):
        states = torch.empty(1, length, 3, device="meta", requires_grad=True)
        set_stage_shapes(stages[0], [torch.empty(1, length, 3, device="meta")], [states])
        set_stage_shapes(stages[1], [states], [states])
        x, y = torch.randn(2, 4, length, 3)
        use_stage_shapes(training)
        for schedule in (training, evaluation):
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
            wanted = mse_loss(stages[1].submod(stages[0].submod(x)), y)
            torch.testing.assert_close(torch.stack(losses).mean(), wanted.detach())
