"""The routers' auxiliary loss over all layers, in stages as in the unsplit model."""

import pytest
import torch
import transformers
from architectures import ROWS, make_model, padded
from harness import RankPool
from oracle import Case, build, compare, run_rank, run_whole
from test_parity import FOUR_RANKS, TWO_RANKS

from pp_patch_hf import verify_pipeline
from pp_split_hf import check_pipeline_support

LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Routers of every kind: before and after the experts, hashed, beside attention or state spaces.
NAMES = (
    "dbrx", "deepseek_v4", "ernie4_5_moe", "gpt_oss", "granitemoe", "jamba", "minimax", "mixtral",
    "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name in ROWS])
def test_every_cut(name: str) -> None:
    row = ROWS[name]
    model = make_model({**row, "overrides": {**row["overrides"], **LOSS}})
    for inputs in (None, padded(row)):
        report = verify_pipeline(model, inputs=inputs)
        assert report.exact, f"\n{report}"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_it_changes_gradients(name: str) -> None:
    row = ROWS[name]
    gradients = []
    for overrides in ({}, LOSS):
        model = make_model({**row, "overrides": {**row["overrides"], **overrides}})
        output = model(**padded(row), use_cache=False)
        loss = output.logits.square().sum() + 0.5 * (output.aux_loss or 0.0)
        loss.backward()
        gradients.append([p.grad for n, p in model.named_parameters() if "gate.weight" in n])
    assert gradients[0]
    assert not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "v_schedule"])
def test_training(ranks: RankPool, schedule: str, world_size: int) -> None:
    counts = (TWO_RANKS if world_size == 2 else FOUR_RANKS)["uneven"][
        1 if schedule == "1f1b" else 2
    ]
    # The sums are made in float32, as Transformers makes them.
    case = Case("mixtral", schedule, counts, "padded", overrides=LOSS, by_microbatch=True)
    runs = ranks.run(world_size, run_rank, case, timeout=120)
    compare(run_whole(case), runs, 1e-5)


def evaluate(coefficient: float) -> float:
    overrides = {**LOSS, "router_aux_loss_coef": coefficient}
    case = Case("mixtral", "1f1b", (2, 2), "padded", overrides=overrides)
    loss = build(case).eval(**case.inputs(seed=5)).loss
    assert loss is not None
    return loss.item()


def test_evaluation_counts_it_too(ranks: RankPool) -> None:
    without, with_half = (ranks.run(2, evaluate, coefficient)[0] for coefficient in (0.0, 0.5))
    assert 0.4 < with_half - without < 2.0  # the loss itself is 1 for balanced experts, or more


def test_a_loss_of_its_own_is_refused() -> None:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **LOSS,
    )  # fmt: skip
    model = OwnLoss(config)
    [problem] = check_pipeline_support(model)
    assert "OwnLoss computes its routers' loss in a way of its own" in problem
    assert "output_router_logits=False" in problem
    model.config.output_router_logits = False
    assert check_pipeline_support(model) == []


class OwnLoss(transformers.MixtralForCausalLM):
    """Of this module, and so is the function that it finds."""


def load_balancing_loss_func(
    gate_logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int, attention_mask: object
) -> torch.Tensor:
    return torch.stack([logits.square().mean() for logits in gate_logits]).sum()
