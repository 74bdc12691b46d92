"""Weights of stages that are sharded, cut and spread: first values, checkpoints in and out, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import make_optimizer, token_mean
from test_mixed_parallelism import AS_IT_IS, ROWS, whole
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from pp_autopipeline import AutoPipeline, Checkpoints, ParallelSizes, init_empty_weights
from pp_autopipeline.parallelize import DistributedSetup, FSDP2Config

AXES = {
    "pp x dp": ({"pp_size": 2, "dp_size": 2}, "llama"),
    "pp x tp": ({"pp_size": 2, "tp_size": 2}, "qwen3"),
    "dp x tp": ({"dp_size": 2, "tp_size": 2}, "llama"),
    "copies x shards": ({"dp_size": 4, "dp_replicate_size": 2}, "llama"),
    "pp x dp x ep": ({"pp_size": 2, "dp_size": 2, "ep_size": 2}, "mixtral"),
    "dp x cp, experts over both": ({"dp_size": 2, "cp_size": 2, "ep_size": 4}, "mixtral"),
}


def empty(sizes: dict[str, int], family: str) -> AutoPipeline:
    """A pipeline whose model has no values yet."""
    setup = DistributedSetup.build(
        FSDP2Config(mp_policy=AS_IT_IS), ParallelSizes(**sizes), device_type="cpu"
    )
    with init_empty_weights():
        model = tiny_model(family, 3, torch.float32)
    return AutoPipeline(
        **setup.pipeline_axes, pp_microbatch_size=2, pp_batch_size=ROWS, loss_reduction="mean"
    ).build(model, loss_fn=lambda x, y: x.sum(), parallelize_fn=setup.parallelize_fn)


def named(ap: AutoPipeline) -> dict[str, torch.Tensor]:
    return {name: whole(p) for part in ap.parts for name, p in part.named_parameters()}


def first_values(axes: str) -> dict[str, torch.Tensor]:
    return named(empty(*AXES[axes]).materialize(seed=3))


@pytest.mark.parametrize("axes", AXES)
def test_first_values_do_not_depend_on_the_axes(ranks: RankPool, axes: str) -> None:
    (wanted,) = ranks.run(1, alone, AXES[axes][1])
    found: dict[str, torch.Tensor] = {}
    for values in ranks.run(4, first_values, axes):
        found |= values
        assert all(torch.equal(value, wanted[name]) for name, value in values.items())
    assert found.keys() == wanted.keys()


def alone(family: str) -> dict[str, torch.Tensor]:
    return named(empty({}, family).materialize(seed=3))


def there_and_back(axes: str, folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    ap = empty(*AXES[axes])
    ap.load_pretrained(f"{folder}/given")
    ap.save_pretrained(f"{folder}/saved")
    ids = torch.arange(ROWS * 6).view(ROWS, 6) % 60 + 2
    return named(ap), ap.eval(ids, target=ids).loss


@pytest.mark.parametrize("axes", AXES)
def test_a_checkpoint_goes_in_and_out(ranks: RankPool, axes: str, tmp_path: Path) -> None:
    model = tiny_model(AXES[axes][1], 3, torch.float32)
    model.save_pretrained(tmp_path / "given")
    wanted = dict(model.named_parameters())
    for values, _ in ranks.run(4, there_and_back, axes, str(tmp_path)):
        assert values
        assert all(torch.equal(value, wanted[name]) for name, value in values.items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


# --- training goes on elsewhere


def build(sizes: dict[str, int], family: str) -> AutoPipeline:
    setup = DistributedSetup.build(
        FSDP2Config(mp_policy=AS_IT_IS), ParallelSizes(**sizes), device_type="cpu"
    )
    model = tiny_model(family, 3, torch.float64)
    return AutoPipeline(
        **setup.pipeline_axes, pp_microbatch_size=2, pp_batch_size=ROWS
    ).build(model, loss_fn=token_mean, parallelize_fn=setup.parallelize_fn)  # fmt: skip


def train(axes: str, folder: str, resume: bool) -> list[float]:
    """Four steps, saved after the second; or the last two of them, resumed."""
    sizes, family = {"alone": ({}, "llama"), **AXES}[axes]
    ap = build(sizes, family)
    optimizer = make_optimizer(ap.parts, torch.float64)
    checkpoints = Checkpoints(folder)
    start = 0
    if resume:
        with torch.no_grad():
            for parameter in ap.parameters():
                parameter.fill_(7.0)
        start = checkpoints.load(ap, optimizer).step
        assert start == 2
    losses = []
    for step in range(start, 4):
        loss = ap.step(**make_batch("uneven", ROWS, 30 + step)).loss  # alike on all replicas
        assert loss is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            checkpoints.save(2, ap, optimizer)
    return losses


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp x dp", "pp x dp"),
        ("pp x dp", "dp x tp"),
        ("dp x tp", "copies x shards"),
        ("copies x shards", "alone"),
        ("alone", "pp x dp"),
        ("pp x dp x ep", "dp x cp, experts over both"),
    ],
)
def test_training_goes_on_over_other_axes(
    ranks: RankPool, before: str, after: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    first = ranks.run(1 if before == "alone" else 4, train, before, folder, False)
    for losses in ranks.run(1 if after == "alone" else 4, train, after, folder, True):
        assert losses == pytest.approx(first[0][2:], rel=1e-9)
