"""Frozen parts, as in adapter training: what is trained gets the oracle's gradient, what is frozen none."""

import itertools
from pathlib import Path

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import token_mean
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pp_autopipeline import AutoPipeline, clip_grad_norm
from pp_schedule import dump_csv, zb_h1_order
from pp_split_hf import find_layout, plan_stage_fqns

COUNTS = {1: (2, 2), 2: (1, 1, 1, 1)}
SCHEDULES = [
    *("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule", "dualpipev"),
    "zb_h1.csv",
]
SPLITTING = SCHEDULES[4:]
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
# Parts of stages: what is trained, by words in the names of parameters.
TRAINED = {
    "all but the embedding": ("layers", "norm", "lm_head"),
    "embedding": ("embed_tokens",),
    "embedding and head": ("embed_tokens", "lm_head"),
    "outer layers": ("layers.0.", "layers.3."),
    "norms": ("norm",),
    "adapters": ("adapter",),
    "adapters of the first layer": ("layers.0.self_attn.q_proj.adapter",),
    "adapters of the last layer": ("layers.3.self_attn.q_proj.adapter",),
    "adapters and head": ("adapter", "lm_head"),
}


class Adapted(nn.Module):
    """A projection with a small one beside it."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.whole = whole
        self.adapter_down = nn.Linear(whole.in_features, 2, bias=False, dtype=whole.weight.dtype)
        self.adapter_up = nn.Linear(2, whole.out_features, bias=False, dtype=whole.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small: torch.Tensor = self.adapter_up(self.adapter_down(x))
        return self.whole(x) + small


def frozen_model(kind: str) -> torch.nn.Module:
    model = tiny_model("llama", 4)
    for stage in FROZEN.get(kind, ()):
        for name in STAGES[stage]:
            model.get_submodule(name).requires_grad_(False)
    if kind in TRAINED:
        torch.manual_seed(3)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        for name, p in model.named_parameters():
            p.requires_grad_(any(word in name for word in TRAINED[kind]))
    return model


def train(
    schedule: str, kind: str, folder: str
) -> tuple[float, float, dict[str, torch.Tensor], bool]:
    model = frozen_model(kind)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    single = schedule in ("1f1b", "gpipe", "zb_h1.csv")
    plan = plan_stage_fqns(find_layout(model), COUNTS[1 if single else 2])
    csv = None
    if schedule.endswith("csv"):
        csv = f"{folder}/{mesh.get_rank()}.csv"
        dump_csv(zb_h1_order(2, 4), csv)
    ap = AutoPipeline(
        mesh,
        pp_schedule=None if csv else schedule,
        pp_schedule_csv=csv,
        pp_microbatch_size=2,
        pp_batch_size=8,
        module_fqns_per_model_part=plan,
    ).build(model, loss_fn=token_mean)
    loss = ap.step(**make_batch("padded", 8)).loss
    assert loss is not None
    gradients = {
        n: p.grad.clone()
        for part in ap.parts
        for n, p in part.named_parameters()
        if p.grad is not None
    }
    norm = clip_grad_norm(0.1, ap.parts, device_mesh=mesh)
    trained = [p for p in ap.parameters() if p.requires_grad]
    if trained:  # an optimizer takes what there is
        torch.optim.AdamW(trained).step()
    ap.step(**make_batch("padded", 8))
    still = all(p.grad is None for p in ap.parameters() if not p.requires_grad)
    return loss.item(), norm.item(), gradients, still


CASES = [
    *itertools.product(SCHEDULES, FROZEN),
    *itertools.product(SPLITTING, TRAINED),  # a whole backward is autograd's own
]


@pytest.mark.parametrize(("schedule", "kind"), CASES)
def test_frozen_parts(ranks: RankPool, schedule: str, kind: str, tmp_path: Path) -> None:
    model = frozen_model(kind)
    batch = make_batch("padded", 8)
    target = batch.pop("target")
    loss = token_mean(model(**batch, use_cache=False).logits, target)
    if loss.requires_grad:
        loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    runs = ranks.run(2, train, schedule, kind, str(tmp_path))
    got = {name: gradient for run in runs for name, gradient in run[2].items()}
    assert runs[0][0] == runs[1][0] == pytest.approx(loss.item(), rel=1e-9)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)
    norm = torch.nn.utils.get_total_norm(list(wanted.values())).item() if wanted else 0.0
    assert runs[0][1] == runs[1][1] == pytest.approx(norm, rel=1e-9)
    assert all(run[3] for run in runs)
