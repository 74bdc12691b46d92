"""Frozen parts, as in adapter training: what is trained gets the oracle's gradient, what is frozen none."""

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import token_mean
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh

from pp_autopipeline import AutoPipeline, clip_grad_norm
from pp_split_hf import find_layout, plan_stage_fqns

COUNTS = {1: (2, 2), 2: (1, 1, 1, 1)}
# Stage by stage of four: embedding and layer 0, layer 1, layer 2, layer 3 with norm and head.
STAGES = {
    0: ("model.embed_tokens", "model.layers.0"),
    1: ("model.layers.1",),
    2: ("model.layers.2",),
    3: ("model.layers.3", "model.norm", "lm_head"),
}
FROZEN = {
    "first": (0,),
    "first two": (0, 1),
    "second": (1,),
    "third": (2,),
    "last": (3,),
    "all but last": (0, 1, 2),
    "all but first": (1, 2, 3),
    "all": (0, 1, 2, 3),
}


def frozen_model(frozen: tuple[int, ...]) -> torch.nn.Module:
    model = tiny_model("llama", 4)
    for stage in frozen:
        for name in STAGES[stage]:
            model.get_submodule(name).requires_grad_(False)
    return model


def train(schedule: str, frozen: tuple[int, ...]) -> tuple[float, float, dict[str, torch.Tensor]]:
    model = frozen_model(frozen)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    counts = COUNTS[1 if schedule in ("1f1b", "gpipe") else 2]
    plan = plan_stage_fqns(find_layout(model), counts)
    ap = AutoPipeline(
        mesh,
        pp_schedule=schedule,
        pp_microbatch_size=2,
        pp_batch_size=8,
        module_fqns_per_model_part=plan,
    ).build(model, loss_fn=token_mean)
    loss = ap.step(**make_batch("padded", 8)).loss
    assert loss is not None
    gradients = {
        n: p.grad for part in ap.parts for n, p in part.named_parameters() if p.grad is not None
    }
    norm = clip_grad_norm(None, ap.parts, device_mesh=mesh)
    return loss.item(), norm.item(), gradients


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule", "dualpipev"],
)
def test_frozen_stages(ranks: RankPool, schedule: str, frozen: str) -> None:
    model = frozen_model(FROZEN[frozen])
    batch = make_batch("padded", 8)
    target = batch.pop("target")
    loss = token_mean(model(**batch, use_cache=False).logits, target)
    if loss.requires_grad:
        loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    runs = ranks.run(2, train, schedule, FROZEN[frozen])
    got = {name: gradient for run in runs for name, gradient in run[2].items()}
    assert runs[0][0] == runs[1][0] == pytest.approx(loss.item(), rel=1e-9)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)
    norm = torch.nn.utils.get_total_norm(list(wanted.values())).item() if wanted else 0.0
    assert runs[0][1] == runs[1][1] == pytest.approx(norm, rel=1e-9)
