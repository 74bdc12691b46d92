"""Stages under FSDP: what accumulates stays, through evaluations and other lengths, for every schedule."""

from functools import partial
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import MAX_NORM, token_mean
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pp_autopipeline import AutoPipeline, clip_grad_norm
from pp_split_hf import find_layout, plan_stage_fqns

BATCHES = [
    make_batch("padded", 8, 5),
    make_batch("padded", 8, 6),
    make_batch("plain", 8, 7, seq_len=11),
    make_batch("plain", 8, 8, seq_len=3),
]
# An evaluation between steps, also of another length; steps of other lengths.
CALLS = [("eval", 1), ("step", 0), ("eval", 1), ("step", 2), ("eval", 3), ("step", 1), ("step", 3)]


def shard(
    model: nn.Module, world_mesh: DeviceMesh, moe_mesh: Any, *, reshard: bool | None, **axes: Any
) -> None:
    for layer in model.get_submodule("model.layers").children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=world_mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=world_mesh["dp"], reshard_after_forward=reshard)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(
    model: nn.Module, schedule: str, counts: tuple[int, ...], reshard: bool | None
) -> AutoPipeline:
    return AutoPipeline(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        pp_schedule=schedule,
        pp_microbatch_size=2,
        pp_batch_size=8,
        module_fqns_per_model_part=plan_stage_fqns(find_layout(model), counts),
    ).build(model, loss_fn=token_mean, parallelize_fn=partial(shard, reshard=reshard))


def train(
    schedule: str, counts: tuple[int, ...], reshard: bool | None
) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    ap = build(tiny_model("llama", 4), schedule, counts, reshard)
    losses = []
    for call, index in CALLS:
        loss = getattr(ap, call)(**BATCHES[index]).loss
        losses.append(loss.item())
        parameters = [p for part in ap.parts for p in part.parameters()]
        assert all(isinstance(p, DTensor) for p in parameters), "a stage was left gathered"
    norm = clip_grad_norm(MAX_NORM, ap.parts, device_mesh=ap.world_mesh).item()
    named = [item for part in ap.parts for item in part.named_parameters()]
    return losses, norm, {name: whole(p.grad) for name, p in named if p.grad is not None}


@pytest.mark.parametrize("reshard", [False, None])
@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ("1f1b", (2, 2)),
        ("gpipe", (2, 2)),
        ("interleaved_1f1b", (1, 1, 1, 1)),
        ("looped_bfs", (1, 1, 1, 1)),
        ("zero_bubble", (1, 1, 1, 1)),
        ("v_schedule", (1, 1, 1, 1)),
        ("dualpipev", (1, 1, 1, 1)),
    ],
)
def test_gradients_accumulate(
    ranks: RankPool, schedule: str, counts: tuple[int, ...], reshard: bool | None
) -> None:
    model = tiny_model("llama", 4)
    wanted = []
    for call, index in CALLS:
        inputs = dict(BATCHES[index])
        target = inputs.pop("target")
        loss = token_mean(model(**inputs, use_cache=False).logits, target)
        wanted.append(loss.item())
        if call == "step":
            loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    runs = ranks.run(4, train, schedule, counts, reshard)
    got = {name: gradient for run in runs for name, gradient in run[2].items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert got.keys() == gradients.keys()
    for run in runs:
        assert run[0] == pytest.approx(wanted, rel=1e-9)
        assert run[1] == pytest.approx(norm, rel=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


TIED = {"tie_word_embeddings": True}


def train_tied(schedule: str, counts: tuple[int, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Per step the loss and the norm; and the weights after three steps."""
    ap = build(tiny_model("llama", 4, **TIED), schedule, counts, reshard=False)
    optimizer = torch.optim.SGD(ap.parameters(), lr=0.1)
    seen = []
    for batch in BATCHES[:3]:
        loss = ap.step(**batch).loss
        norm = clip_grad_norm(MAX_NORM, ap.parts, device_mesh=ap.world_mesh)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    named = [x for part in ap.parts for x in part.named_parameters(remove_duplicate=False)]
    return seen, {name: whole(p).detach() for name, p in named}


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("1f1b", (2, 2)), ("zero_bubble", (1, 1, 1, 1)), ("v_schedule", (1, 1, 1, 1))],
)
def test_tied_weights(ranks: RankPool, schedule: str, counts: tuple[int, ...]) -> None:
    model = tiny_model("llama", 4, **TIED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for batch in BATCHES[:3]:
        inputs = dict(batch)
        target = inputs.pop("target")
        loss = token_mean(model(**inputs, use_cache=False).logits, target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(pytest.approx((loss.item(), norm.item()), rel=1e-9))
    weights = dict(model.named_parameters(remove_duplicate=False))
    for seen, found in ranks.run(4, train_tied, schedule, counts):
        assert seen == wanted
        for name, weight in found.items():
            torch.testing.assert_close(weight, weights[name].detach(), rtol=1e-8, atol=1e-10)
