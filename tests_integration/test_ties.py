"""Weights that are tied over stages are trained as one, whatever rank their stages are on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool, RanksFailed
from oracle import Case, build, compare, run_rank, run_whole, token_mean
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from pp_autopipeline import AutoPipeline, init_empty_weights
from pp_split_hf import find_layout, plan_stage_fqns

TIED = {"tie_word_embeddings": True}
COUNTS = {2: {1: (1, 3), 2: (2, 0, 1, 1)}, 4: {1: (1, 2, 1, 0), 2: (1, 0, 1, 1, 0, 1, 0, 0)}}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble", "v_schedule"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tied_embeddings(ranks: RankPool, family: str, schedule: str, world_size: int) -> None:
    counts = COUNTS[world_size][1 if schedule == "1f1b" else 2]
    dtype = torch.float32 if family == "gemma2" else torch.float64
    case = Case(family, schedule, counts, "uneven", dtype=dtype, overrides=TIED)
    rtol = 1e-5 if dtype == torch.float32 else 1e-9
    compare(run_whole(case), ranks.run(world_size, run_rank, case, timeout=120), rtol)


def replicas(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Three steps, two of which accumulate; the tie is made by hand, on meta, or moved."""
    if kind == "hand":
        model = tiny_model("llama", 3)
        model.lm_head.weight = model.model.embed_tokens.weight
    elif kind == "meta":
        with init_empty_weights():
            model = tiny_model("llama", 3, **TIED)
    else:
        model = tiny_model("llama", 3, torch.float32, **TIED)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("pp",))
    ap = AutoPipeline(
        mesh, pp_schedule="v_schedule" if kind == "v" else "1f1b", pp_microbatch_size=2,
        pp_batch_size=8, dtype=torch.float64,
    ).build(model, loss_fn=token_mean).materialize(seed=1)  # fmt: skip
    parameters = {id(p): p for part in ap.parts for p in part.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    losses = []
    for seed in (5, 6, 7):
        loss = ap.step(**make_batch("padded", 8, seed)).loss
        assert loss is not None
        losses.append(loss.item())
        if seed != 5:
            optimizer.step()
            optimizer.zero_grad()
    named = [item for part in ap.parts for item in part.named_parameters(remove_duplicate=False)]
    return {name: p.detach().clone() for name, p in named}, losses


@pytest.mark.parametrize("kind", ["hand", "meta", "moved", "v"])
def test_replicas_stay_equal(ranks: RankPool, kind: str) -> None:
    runs = ranks.run(2, replicas, kind)
    weights = {name: w for run in runs for name, w in run[0].items()}
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    [alone] = ranks.run(1, replicas, kind)
    assert runs[0][1] == runs[1][1] == pytest.approx(alone[1], rel=1e-6)
    for name, weight in alone[0].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-9)


def bare_schedule(sync: bool) -> float:
    ap = build(Case("llama", "1f1b", (2, 1), overrides=TIED))
    optimizer = torch.optim.SGD([p for part in ap.parts for p in part.parameters()], lr=0.1)
    batch = make_batch("plain", 8)
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
    args = (batch["input_ids"],) if ap.info.has_first_stage else ()
    target = batch["target"] if ap.info.has_last_stage else None
    ap.info.schedule.step(*args, target=target, return_outputs=False, **inputs)
    if sync:
        ap.sync_tied_gradients()
    optimizer.step()
    weights = {n: p for part in ap.parts for n, p in part.named_parameters()}
    return weights.get("lm_head.weight", weights.get("model.embed_tokens.weight")).sum().item()


def test_an_optimizer_step_on_gradients_that_are_not_summed(ranks: RankPool) -> None:
    for kind, message in ranks.run_expecting_error(2, bare_schedule, False, timeout=30):
        assert kind == "RuntimeError"
        assert "sync_tied_gradients()" in message
    first, second = ranks.run(2, bare_schedule, True)
    assert first == second


def stepped_twice(once: bool) -> None:
    ap = build(Case("llama", "v_schedule", (1, 1, 1, 0), overrides=TIED))
    both = [p for part in ap.parts for p in part.parameters()]
    optimizer = torch.optim.SGD(ap.parameters() if once else both, lr=0.1)
    ap.step(**make_batch("plain", 8))
    optimizer.step()
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("rank 1 holds no tied weight")


def test_a_tied_weight_that_an_optimizer_holds_twice(ranks: RankPool) -> None:
    first, _ = ranks.run_expecting_error(2, stepped_twice, False, timeout=30)
    assert "is in the optimizer twice" in first[1]
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, stepped_twice, True, timeout=30)
    assert [report.state for report in caught.value.reports] == ["returned", "raised"]


def summaries() -> tuple[list[int], int]:
    model = tiny_model("llama", 3, **TIED)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    plan = plan_stage_fqns(find_layout(model), (2, 1))
    ap = AutoPipeline(mesh, pp_batch_size=8, module_fqns_per_model_part=plan)
    ap.build(model, loss_fn=token_mean)
    return ap.get_stage_param_counts(), ap.get_total_param_count()


def test_a_tied_weight_counts_once(ranks: RankPool) -> None:
    counts, total = ranks.run(2, summaries)[0]
    assert total == sum(p.numel() for p in tiny_model("llama", 3, **TIED).parameters())
    assert sum(counts) == total


def saved(folder: str) -> torch.Tensor | None:
    model = tiny_model("llama", 3, torch.float32, **TIED)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    ap = AutoPipeline(mesh, pp_batch_size=8, pp_microbatch_size=2)
    ap.build(model, loss_fn=token_mean)
    batch = make_batch("plain", 8)
    ap.step(**batch)
    torch.optim.SGD([p for part in ap.parts for p in part.parameters()], lr=0.1).step()
    ap.save_pretrained(Path(folder, "saved"))
    return ap.eval(batch["input_ids"]).logits


def test_a_checkpoint_has_a_tied_weight_once(ranks: RankPool, tmp_path: Path) -> None:
    _, logits = ranks.run(2, saved, str(tmp_path))
    files = list((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) == 2  # each rank has written one
    names = [name for file in files for name in load_file(file)]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wanted = model(make_batch("plain", 8)["input_ids"]).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
