"""Heads other than a language model's, and decoders without one: exact when cut anywhere.

Classification of sequences and of tokens, question answering, the bare decoder: whole against
chained stages in one process, and a sequence classifier trained on two ranks.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness import RankPool
from oracle import make_optimizer
from tiny_models import tiny_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pp_autopipeline import AutoPipeline
from pp_patch_hf import patch_hf_model_for_pp, verify_pipeline
from pp_split_hf import (
    check_pipeline_support,
    find_layout,
    main_output,
    plan_stage_fqns,
    split_model_into_stages,
)

PREFIXES = {
    "llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma2", "gpt2": "GPT2", "mistral": "Mistral",
    "mixtral": "Mixtral",
}  # fmt: skip
SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")
CASES = [
    (family, suffix)
    for family, prefix in PREFIXES.items()
    for suffix in SUFFIXES
    if hasattr(transformers, prefix + suffix)
]
PAD, NUM_LABELS = 0, 3


def make_model(
    family: str, suffix: str, dtype: torch.dtype = torch.float64, **overrides: Any
) -> nn.Module:
    """A random model with four layers, in eval mode, the same in every process."""
    settings = {"pad_token_id": PAD, "num_labels": NUM_LABELS, **overrides}
    config = tiny_config(family, 4, **settings)
    torch.manual_seed(12)
    model = getattr(transformers, PREFIXES[family] + suffix)(config)
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def padded(side: str, rows: int = 4, seed: int = 3) -> dict[str, torch.Tensor]:
    """Rows of differing lengths, filled up with the padding's id on one side."""
    ids = torch.randint(3, 64, (rows, 10), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = 2 * (row % 4)
        mask[row, :padding] = 0 if side == "left" else 1
        mask[row, 10 - padding :] = 1 if side == "left" else 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = ids.masked_fill(mask == 0, PAD)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize(("family", "suffix"), CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_cut_is_exact(family: str, suffix: str, side: str) -> None:
    dtype, rtol = torch.float64, 1e-9
    if family == "gemma2":  # its own attention gives NaN for padded float64
        dtype, rtol = torch.float32, 1e-5
    model = make_model(family, suffix, dtype)
    assert check_pipeline_support(model) == []
    splits = [(cut, 4 - cut) for cut in range(5)] + [(1, 0, 3)]
    report = verify_pipeline(model, splits, padded(side), rtol)
    assert [cut.layer_counts for cut in report.cuts] == splits
    assert report.exact, f"\n{report}"


def whole_and_stages(
    model: nn.Module, inputs: dict[str, torch.Tensor], counts: tuple[int, ...]
) -> tuple[nn.Module, torch.Tensor, list[nn.Module], torch.Tensor]:
    """The model and its chained stages with what they return, both after a backward."""
    whole = copy.deepcopy(model)
    wanted = main_output(whole(**inputs))
    wanted.square().sum().backward()
    plan = plan_stage_fqns(find_layout(model), counts)
    parts = split_model_into_stages(model, plan, range(len(plan)))
    states = inputs["input_ids"]
    for part in parts:
        patch_hf_model_for_pp(part)
        states = part(states, **inputs)
    states.square().sum().backward()
    return whole, wanted, parts, states


@pytest.mark.parametrize(("family", "suffix"), CASES)
def test_a_head_is_trained_and_nothing_is_dropped(family: str, suffix: str) -> None:
    model = make_model(family, suffix, torch.float32)
    heads = find_layout(model).heads
    assert len(heads) == (suffix != "Model")
    whole, _, parts, _ = whole_and_stages(model, padded("right"), (1, 2, 1))
    for head in heads:
        pairs = zip(
            whole.get_submodule(head).named_parameters(),
            parts[-1].get_submodule(head).named_parameters(),
            strict=True,
        )
        for (name, mine), (_, theirs) in pairs:
            assert mine.grad is not None, name
            assert mine.grad.abs().max() > 0
            torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-5, atol=1e-7)
    keys = [key for part in parts for key in part.state_dict()]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(whole.state_dict())


# --- one label per row


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", PREFIXES)
def test_the_last_stage_finds_the_last_token_of_each_row(family: str, side: str) -> None:
    model = make_model(family, "ForSequenceClassification", torch.float32)
    inputs = padded(side)
    [head] = find_layout(model).heads
    per_token: list[torch.Tensor] = []
    model.get_submodule(head).register_forward_hook(lambda *call: per_token.append(call[-1]))
    _, wanted, _, got = whole_and_stages(model, inputs, (1, 3))
    positions = torch.arange(10) * (inputs["input_ids"] != PAD)
    assert positions.argmax(1).tolist() == ([9] * 4 if side == "left" else [9, 7, 5, 3])
    assert got.shape == (4, NUM_LABELS)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    logits = per_token[-1]  # of the last stage, whose head has the hook too
    torch.testing.assert_close(got, logits[torch.arange(4), positions.argmax(1)])


def test_without_a_padding_id_only_one_row_has_a_last_token() -> None:
    model = make_model("llama", "ForSequenceClassification", pad_token_id=None)
    [problem] = check_pipeline_support(model)
    assert "no padding token is defined" in problem
    with pytest.raises(ValueError, match="no padding token is defined"):
        verify_pipeline(model)


@pytest.mark.parametrize("num_labels", [1, 2, 13, 80])
@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForTokenClassification"])
def test_number_of_labels(suffix: str, num_labels: int) -> None:
    model = make_model("llama", suffix, num_labels=num_labels)
    layout = find_layout(model)
    assert layout.trace.outputs[layout.heads[0]].sizes(4, 10) == [4, 10, num_labels]
    report = verify_pipeline(model, [(2, 2), (1, 1, 2)], padded("right"), 1e-9)
    assert report.exact, f"\n{report}"


# --- several outputs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_both_logits_of_question_answering_are_returned(family: str) -> None:
    model = make_model(family, "ForQuestionAnswering")
    inputs = padded("right")
    output = model(**inputs)
    _, _, _, got = whole_and_stages(model, inputs, (1, 3))
    assert got.shape == (4, 10, 2)
    torch.testing.assert_close(got[..., 0], output.start_logits, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got[..., 1], output.end_logits, rtol=1e-9, atol=1e-12)


def test_one_of_several_heads_is_never_all_that_is_returned() -> None:
    model = make_model("gpt2", "DoubleHeadsModel")
    [problem] = check_pipeline_support(model)
    assert "returns more than one tensor (logits, mc_logits)" in problem
    with pytest.raises(ValueError, match=r"returns more than one tensor \(logits, mc_logits\)"):
        verify_pipeline(model)


def test_the_first_of_several_tensors_is_never_all_that_is_returned() -> None:
    first, second = torch.zeros(2, 8, 4), torch.zeros(2, 4)
    assert main_output((first, None, (second,))) is first
    with pytest.raises(ValueError, match=r"more than one tensor \(output\[0\], output\[2\]\)"):
        main_output((first, None, second))


# --- in training on two ranks, with a label or a span per row

Trained = tuple[list[float], dict[str, torch.Tensor]]
COUNTS = {"1f1b": (3, 1), "interleaved_1f1b": (1, 2, 0, 1), "v_schedule": (1, 1, 2, 0)}
LENGTH = 10


def per_row_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of classes `[rows]` for logits `[rows, classes]`, or of spans `[rows, 2]` for positions."""
    return F.cross_entropy(logits, target)


def labelled(suffix: str, step: int) -> dict[str, Any]:
    """Eight rows with a class or a span each, of which one does not count."""
    shape, limit = ((8,), NUM_LABELS) if suffix == "ForSequenceClassification" else ((8, 2), LENGTH)
    target = torch.randint(limit, shape, generator=torch.Generator().manual_seed(step))
    target[2] = -100
    return {**padded("left" if step else "right", 8, seed=step), "target": target}


def train_whole(family: str, suffix: str) -> Trained:
    model = make_model(family, suffix).train()
    optimizer = make_optimizer([model], torch.float64)
    losses = []
    for step in range(2):
        batch = labelled(suffix, step)
        target = batch.pop("target")
        loss = per_row_mean(main_output(model(**batch, use_cache=False)), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def pipeline(family: str, suffix: str, schedule: str) -> AutoPipeline:
    model = make_model(family, suffix).train()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    plan = plan_stage_fqns(find_layout(model), COUNTS[schedule])
    return AutoPipeline(
        mesh,
        pp_schedule=schedule,
        pp_microbatch_size=2,
        pp_batch_size=8,
        module_fqns_per_model_part=plan,
    ).build(model, loss_fn=per_row_mean)


def train_rank(family: str, suffix: str, schedule: str) -> Trained:
    ap = pipeline(family, suffix, schedule)
    optimizer = make_optimizer(ap.parts, torch.float64)
    losses = []
    for step in range(2):
        loss = ap.step(**labelled(suffix, step)).loss
        assert loss is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for part in ap.parts for name, p in part.named_parameters()}


@pytest.mark.parametrize("schedule", COUNTS)
@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_target_per_row(ranks: RankPool, family: str, suffix: str, schedule: str) -> None:
    losses, weights = train_whole(family, suffix)
    runs = ranks.run(2, train_rank, family, suffix, schedule)
    got = {name: weight for _, each in runs for name, weight in each.items()}
    assert runs[0][0] == runs[1][0] == pytest.approx(losses, rel=1e-9)
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-9, atol=1e-9, msg=name)


def give_wrong_targets() -> list[str]:
    said = []
    for suffix, target in (
        ("ForSequenceClassification", torch.zeros(8, LENGTH, dtype=torch.long)),
        ("ForSequenceClassification", torch.full((8,), NUM_LABELS)),
        ("ForQuestionAnswering", torch.zeros(8, LENGTH, dtype=torch.long)),
        ("ForQuestionAnswering", torch.full((8, 2), LENGTH)),
    ):
        with pytest.raises(ValueError, match="cannot run this batch") as caught:
            pipeline("llama", suffix, "1f1b").step(**{**labelled(suffix, 0), "target": target})
        said.append(str(caught.value).partition("\n")[2].strip())
    return said


def test_targets_of_another_head(ranks: RankPool) -> None:
    for said in ranks.run(2, give_wrong_targets):
        assert said == [
            "target has shape (8, 10), and the model gives 3 numbers per row: the target is "
            "[rows], or [rows, 3]",
            "target has values from 3 to 3; the model takes 0 to 2, or -100 for what does not count",
            "target has shape (8, 10), and the model finds a span in each row: the target is "
            "[rows, 2], start and end",
            "target has values from 10 to 10; the model takes 0 to 9, or -100 for what does not "
            "count",
        ]
