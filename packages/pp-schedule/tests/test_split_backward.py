import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from pp_schedule import Action, build_pipeline_schedule, dump_csv


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        # Of the size of a microbatch: both get one tensor as their gradient.
        self.one, self.other = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + self.one + self.other


def make_stages() -> list[PipelineStage]:
    torch.manual_seed(0)
    return [PipelineStage(Part(), index, 2, torch.device("cpu")) for index in range(2)]


def train(stages: list[PipelineStage], name: str | None, csv: str | None = None) -> Any:
    """Two steps; the gradients of the second stage."""
    schedule = build_pipeline_schedule(csv, name, 1, 4, stages, mse_loss)
    torch.manual_seed(1)
    for _ in range(2):
        schedule.step(torch.randn(4, 3), target=torch.randn(4, 3))
    return {n: p.grad for n, p in stages[1].submod.named_parameters()}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_a_whole_backward(one_rank: None, frozen: bool) -> None:
    found = []
    for name in ("looped_bfs", "zero_bubble"):
        stages = make_stages()
        stages[0].submod.requires_grad_(not frozen)
        found.append(train(stages, name))
        assert (stages[1].dw_builder is not None) == (frozen and name == "zero_bubble")
    same(*found)


def test_a_file_that_splits(one_rank: None, tmp_path: Any) -> None:
    wanted = make_stages(), make_stages()
    wanted[0][0].submod.requires_grad_(False)
    wanted[1][0].submod.requires_grad_(False)
    row = [Action(s, "F", m) for s in (0, 1) for m in range(4)]
    row += [Action(s, kind, m) for s in (1, 0) for kind in "IW" for m in range(4)]
    dump_csv({0: row}, tmp_path / "order.csv")
    same(train(wanted[0], "looped_bfs"), train(wanted[1], None, str(tmp_path / "order.csv")))


def test_schedules_that_share_stages_guard_them_once(one_rank: None) -> None:
    stages = make_stages()
    train(stages, "zero_bubble")
    guarded = vars(stages[1])["forward_maybe_with_nosync"]
    train(stages, "zbv")
    assert vars(stages[1])["forward_maybe_with_nosync"] is guarded
    assert "forward_maybe_with_nosync" not in vars(stages[0])


def test_weights_that_are_given_up_after_the_forward(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    stages = make_stages()

    def give_up(module: nn.Module, *_: Any) -> None:
        module.one = nn.Parameter(module.one.detach())  # as FSDP puts its shard in place

    stages[1].submod.register_forward_hook(give_up)
    with caplog.at_level(logging.WARNING):
        train(stages, "zero_bubble")
    assert stages[1].dw_builder is not None
    [record] = caplog.records
    assert "stage 1's weights" in record.message
    assert "reshard_after_forward=False" in record.message


def test_a_stage_with_a_builder_of_its_own_is_left_alone(one_rank: None) -> None:
    stages = make_stages()
    ran: list[int] = []
    builder = stages[1].dw_builder = lambda: lambda *args: ran.append(1)
    train(stages, "zero_bubble")
    assert stages[1].dw_builder is builder
    assert len(ran) == 2 * 4
