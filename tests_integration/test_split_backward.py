"""Split backwards of raw stages: no gradient is lost where a stage's input needs none."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_schedule import (
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    stage_ids_this_rank,
    zb_h1_order,
)

WIDTH, MICROBATCHES = 4, 4
SCHEDULES = ("zero_bubble", "zbv", "dualpipev", "zb_h1.csv")


class Part(nn.Module):
    def __init__(self, index: int, kind: str, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # Of the size of one microbatch's output: their gradients are one tensor, as it was received.
        self.bias, self.other = (nn.Parameter(torch.randn(1, WIDTH)) for _ in range(2))
        self.is_cut = kind == "detached" and index == num_stages - 1
        self.is_last = index == num_stages - 1
        self.sends_two = kind == "branch"
        self.sends_a_view = kind == "view"

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = x.detach() if self.is_cut else x
        x = self.second(torch.tanh(self.first(x))) + self.bias + self.other
        x = x if y is None else x + y
        if self.sends_a_view:
            return x.view_as(x)
        # The second output depends on no input.
        return (x, self.bias * x.new_ones(len(x), 1)) if self.sends_two and not self.is_last else x


# What is frozen, by stage and parameter; or what else takes a stage's input out of the graph.
KINDS = {
    "nothing": lambda stage, name, last: False,
    "first": lambda stage, name, last: stage == 0,
    "first two": lambda stage, name, last: stage < 2,
    "all but last": lambda stage, name, last: stage < last,
    "last": lambda stage, name, last: stage == last,
    "middle": lambda stage, name, last: 0 < stage < last,
    "all": lambda stage, name, last: True,
    "matrices": lambda stage, name, last: "weight" in name,
    "all but one bias": lambda stage, name, last: (stage, name) != (last, "bias"),
    "detached": lambda stage, name, last: False,
    "branch": lambda stage, name, last: False,
    "view": lambda stage, name, last: False,
}


def make_parts(kind: str, num_stages: int) -> list[Part]:
    parts = [Part(index, kind, num_stages).double() for index in range(num_stages)]
    for stage, part in enumerate(parts):
        for name, p in part.named_parameters():
            p.requires_grad_(not KINDS[kind](stage, name, num_stages - 1))
    return parts


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100)
    return tuple(torch.randn(2, MICROBATCHES, WIDTH, dtype=torch.float64))


def gradients(parts: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": p.grad
        for index, part in parts.items()
        for name, p in part.named_parameters()
        if p.grad is not None
    }


def train(schedule: str, folder: str) -> dict[str, tuple[dict[str, torch.Tensor], int]]:
    """Per kind the gradients of this rank, and how many of its stages do not split."""
    rank, size = dist.get_rank(), dist.get_world_size()
    csv = None
    if schedule.endswith("csv"):
        csv, ids, num_stages = f"{folder}/{rank}.csv", (rank,), size
        dump_csv(zb_h1_order(size, MICROBATCHES), csv)
    else:
        num_stages = 2 * size
        ids = stage_ids_this_rank(rank, size, num_stages, resolve_schedule(schedule).style)
    found = {}
    for kind in KINDS:
        parts = {i: p for i, p in enumerate(make_parts(kind, num_stages)) if i in ids}
        stages = [PipelineStage(p, i, num_stages, torch.device("cpu")) for i, p in parts.items()]
        built = build_pipeline_schedule(
            csv, schedule, 1, MICROBATCHES, stages, nn.functional.mse_loss, True
        )
        x, y = batch()
        for _ in range(2):
            built.step(*([x] if 0 in ids else []), target=y if num_stages - 1 in ids else None)
        not_split = sum(stage.dw_builder is not None for stage in stages)
        found[kind] = gradients(parts), not_split
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_gradient_is_lost(ranks: RankPool, schedule: str, tmp_path: Path) -> None:
    runs = ranks.run(2, train, schedule, str(tmp_path))
    num_stages = 2 if schedule.endswith("csv") else 4
    x, y = batch()
    for kind in KINDS:
        parts = make_parts(kind, num_stages)
        for _ in range(2):
            output = (x,)
            for part in parts:
                output = part(*output)
                output = output if isinstance(output, tuple) else (output,)
            loss = nn.functional.mse_loss(output[0], y)
            if loss.requires_grad:
                loss.backward()
        wanted = gradients(dict(enumerate(parts)))
        got = {name: g for run in runs for name, g in run[kind][0].items()}
        if kind == "detached":  # a gradient of zeros, which was sent, or none
            got = {name: g for name, g in got.items() if name in wanted or g.any()}
        assert got.keys() == wanted.keys(), kind
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                got[name],
                gradient,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda m, at=(kind, name): f"{at}: {m}",
            )
    assert sum(run["nothing"][1] for run in runs) == 0, "a backward is whole that could be split"
    assert sum(run["first"][1] for run in runs) == 1
