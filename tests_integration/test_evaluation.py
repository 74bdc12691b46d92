"""Evaluation between the steps of raw stages: exact, and training goes on as if it had not been."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from pp_schedule import (
    build_forward_only_schedule,
    build_pipeline_schedule,
    resolve_schedule,
    stage_ids_this_rank,
)

WIDTH, MICROBATCHES, CALLS = 4, 8, "etetete"
NAMES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


class Part(nn.Module):
    """A stage with a buffer that each forward in training mode moves."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards.add_(1.0)
        return self.inner(x)


def batch(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + call)
    return tuple(torch.randn(2, MICROBATCHES, WIDTH, dtype=torch.float64))


@dataclass
class Run:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    forwards: list[float]
    num_calls: list[int]
    """Forwards of a stage per call."""
    untouched: bool
    kept: int
    """Losses that still hold a graph."""


def train_and_evaluate(name: str, calls: str, shards: int) -> Run:
    size = dist.get_world_size() // shards
    mesh = init_device_mesh("cpu", (size, shards), mesh_dim_names=("pp", "dp"))
    spec, rank = resolve_schedule(name), mesh["pp"].get_local_rank()
    num_stages = size * (spec.stages_per_rank or 2)
    ids = {r: stage_ids_this_rank(r, size, num_stages, spec.style) for r in range(size)}
    parts = [Part(index).double() for index in ids[rank]]
    counts = [0]
    for part in parts:
        part.register_forward_pre_hook(lambda *_: counts.__setitem__(-1, counts[-1] + 1))
        if shards > 1:
            fully_shard(part.inner, mesh=mesh["dp"])
            fully_shard(part, mesh=mesh["dp"])
    stages = [
        PipelineStage(part, index, num_stages, torch.device("cpu"), group=mesh["pp"].get_group())
        for part, index in zip(parts, ids[rank], strict=True)
    ]
    loss_fn = nn.functional.mse_loss
    training = build_pipeline_schedule(None, name, 1, MICROBATCHES, stages, loss_fn, True)
    evaluation = build_forward_only_schedule(stages, ids, MICROBATCHES, loss_fn)
    parameters = [p for part in parts for p in part.parameters()]
    run = Run([], {}, [], [], True, 0)
    for call, kind in enumerate(calls):
        x, y = batch(call)
        losses: list[torch.Tensor] = []
        before = [None if p.grad is None else whole(p.grad).clone() for p in parameters]
        for part in parts:
            part.train(kind == "t")
        with torch.set_grad_enabled(kind == "t"):
            (training if kind == "t" else evaluation).step(
                *([x] if 0 in ids[rank] else []),
                target=y if num_stages - 1 in ids[rank] else None,
                losses=losses,
            )
        if kind == "e":
            run.untouched &= all(
                same(p.grad, old) for p, old in zip(parameters, before, strict=True)
            )
        run.kept += sum(loss.requires_grad for loss in losses)
        run.losses += [float(torch.stack(losses).detach().mean())] if losses else []
        run.num_calls.append(counts[-1] // len(parts))
        counts.append(0)
    for part, index in zip(parts, ids[rank], strict=True):
        for key, p in part.named_parameters():
            if p.grad is not None:
                run.gradients[f"{index}.{key}"] = whole(p.grad)
    run.forwards = [float(part.forwards) for part in parts]
    return run


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(gradient: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if gradient is None or before is None:
        return gradient is before
    return torch.equal(whole(gradient), before)


def unsplit(num_stages: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.Sequential(*(Part(index) for index in range(num_stages))).double()
    losses = []
    for call, kind in enumerate(CALLS):
        x, y = batch(call)
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        if kind == "t":
            loss.backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_training_alone(ranks: RankPool, name: str, shards: int) -> None:
    runs = ranks.run(2 * shards, train_and_evaluate, name, CALLS, shards)
    losses, gradients = unsplit(2 * (resolve_schedule(name).stages_per_rank or 2))
    assert {key for run in runs for key in run.gradients} == gradients.keys()
    for run in runs:
        assert run.losses in ([], [pytest.approx(loss, rel=1e-12) for loss in losses])
        for key, gradient in run.gradients.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-9, atol=1e-12)
        assert run.untouched
        assert run.kept == 0
        assert run.forwards == [MICROBATCHES * CALLS.count("t")] * len(run.forwards)
        # One trial forward each, and none for going from one to the other.
        assert run.num_calls == [MICROBATCHES + 1] * 2 + [MICROBATCHES] * (len(CALLS) - 2)
    assert any(run.losses for run in runs)
