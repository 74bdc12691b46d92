import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from pp_autopipeline import (
    AutoPipeline,
    PipelineConfig,
    clip_grad_norm,
    generate_hf_model_fqn_per_model_part,
    init_empty_weights,
    pipeline_model,
    scale_grads_by_divisor,
)

Llama = Callable[..., PreTrainedModel]
TWO_STAGES = generate_hf_model_fqn_per_model_part(2, 3)
# Every schedule, on one rank with one stage or two.
RUNS: list[dict[str, Any]] = [
    {"pp_schedule": "1f1b"},
    {"pp_schedule": "gpipe"},
    {"pp_schedule": "interleaved_1f1b"},
    {"pp_schedule": "interleaved_1f1b", "layers_per_stage": 1},
    {"pp_schedule": "looped_bfs", "module_fqns_per_model_part": TWO_STAGES},
    {"pp_schedule": "zero_bubble"},
    {"pp_schedule": "v_schedule"},
    {"pp_schedule": "dualpipev"},
]


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_sum(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def make_batch(rows: int = 8, length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded on the left; two rows without a target that counts, the others with some."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    target = torch.randint(3, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 3] = 0
    target = target.masked_fill(mask == 0, -100)
    target[:2] = -100
    return {
        "input_ids": ids,
        "target": target,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


def whole(
    model: PreTrainedModel, batches: list[dict[str, torch.Tensor]], loss_fn: Any = token_mean
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for batch in batches:
        arguments = {name: value for name, value in batch.items() if name != "target"}
        loss = loss_fn(model(**arguments, use_cache=False).logits, batch["target"])
        loss.backward()
        losses.append(loss.item())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return losses, gradients


def build(mesh: DeviceMesh, model: nn.Module, loss_fn: Any = token_mean, **options: Any) -> Any:
    settings = {"pp_microbatch_size": 2, "pp_batch_size": 8, **options}
    return AutoPipeline(mesh, **settings).build(model, loss_fn=loss_fn)


def same(ap: AutoPipeline, wanted: dict[str, torch.Tensor]) -> None:
    got = {n: p.grad for part in ap.parts for n, p in part.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


# --- a step is that of the whole model


@pytest.mark.parametrize(
    "options", RUNS, ids=lambda options: "-".join([options["pp_schedule"], *list(options)[1:]])
)
@pytest.mark.parametrize("loss_fn", [token_mean, token_sum])
def test_steps_are_those_of_the_whole_model(
    options: dict[str, Any], loss_fn: Any, mesh: DeviceMesh, llama: Llama
) -> None:
    batches = [make_batch(seed=1), make_batch(length=9, seed=2)]
    losses, gradients = whole(llama(3), batches, loss_fn)
    ap = build(mesh, llama(3), loss_fn, **options)
    assert [ap.step(**batch).loss.item() for batch in batches] == pytest.approx(losses, rel=1e-9)
    same(ap, gradients)


@pytest.mark.parametrize("microbatch_size", [1, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_grads_in_schedule": True},
        {"loss_reduction": "mean"},
        {"pp_recv_buffer_pool": True},
    ],
)
def test_options_change_no_number(
    microbatch_size: int, options: dict[str, Any], mesh: DeviceMesh, llama: Llama
) -> None:
    [loss], gradients = whole(llama(2), [make_batch()])
    ap = build(mesh, llama(2), pp_microbatch_size=microbatch_size, **options)
    assert ap.step(**make_batch()).loss.item() == pytest.approx(loss, rel=1e-9)
    same(ap, gradients)


def test_losses_and_logits(mesh: DeviceMesh, llama: Llama) -> None:
    batch = make_batch()
    ap = build(mesh, llama(2), pp_schedule="dfs")
    losses = [torch.tensor(7.0)]
    output = ap.step(**batch, losses=losses, return_outputs=True)
    counts = [(chunk != -100).sum().item() for chunk in batch["target"].chunk(4)]
    assert len(losses) == 4
    assert counts[0] == losses[0] == 0
    weighted = sum(n * x.item() for n, x in zip(counts, losses, strict=True)) / sum(counts)
    assert output.loss.item() == pytest.approx(weighted, rel=1e-9)
    assert output.loss.dtype == torch.float64
    arguments = {name: value for name, value in batch.items() if name != "target"}
    torch.testing.assert_close(output.logits, llama(2)(**arguments).logits, rtol=1e-9, atol=1e-12)
    assert ap.step(**batch).logits is None


def test_a_batch_in_which_nothing_counts(mesh: DeviceMesh, llama: Llama) -> None:
    ap = build(mesh, llama(2))
    batch = make_batch()
    batch["target"] = torch.full_like(batch["target"], -100)
    assert ap.step(**batch).loss.item() == 0.0
    assert clip_grad_norm(1.0, ap.parts, device_mesh=mesh).item() == 0.0


@pytest.mark.parametrize("options", [RUNS[0], RUNS[3], RUNS[6]])
def test_evaluation(options: dict[str, Any], mesh: DeviceMesh, llama: Llama) -> None:
    model = llama(3).train()
    ap = build(mesh, model, **options)
    batch, other = make_batch(seed=1), make_batch(rows=4, length=9, seed=2)
    losses, _ = whole(llama(3), [batch, other])
    _, gradients = whole(llama(3), [batch])
    assert ap.eval(**other).loss.item() == pytest.approx(losses[1], rel=1e-9)
    assert all(p.grad is None for part in ap.parts for p in part.parameters())
    ap.step(**batch)
    output = ap.eval(**other, return_outputs=True)
    assert output.loss.item() == pytest.approx(losses[1], rel=1e-9)
    assert output.logits.shape == (4, 9, 64)
    assert not output.logits.requires_grad
    same(ap, gradients)
    assert all(module.training for part in ap.parts for module in part.modules())


def test_evaluation_without_loss_or_target(mesh: DeviceMesh, llama: Llama) -> None:
    ap = build(mesh, llama(2), loss_fn=None)
    ids = make_batch()["input_ids"]
    output = ap.eval(ids)
    assert output.loss is None
    torch.testing.assert_close(output.logits, llama(2)(ids).logits, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="built without loss_fn"):
        ap.step(ids, target=ids)
    with pytest.raises(ValueError, match="built without loss_fn"):
        ap.eval(ids, target=ids)


def test_what_the_guide_does_after_a_step(mesh: DeviceMesh, llama: Llama) -> None:
    ap = build(mesh, llama(2), loss_fn=token_sum, pp_schedule="interleaved_1f1b")
    batch = make_batch()
    ap.step(**batch)
    count = int((batch["target"] != -100).sum())
    scale_grads_by_divisor(ap.info.stages, divisor=count)
    _, summed = whole(llama(2), [batch], token_sum)
    gradients = {name: gradient / count for name, gradient in summed.items()}
    same(ap, gradients)
    norm = clip_grad_norm(0.1, ap.parts, device_mesh=mesh, pp_axis_name="pp")
    wanted = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    assert norm.item() == pytest.approx(wanted, rel=1e-9)


def test_from_nothing(mesh: DeviceMesh, llama: Llama) -> None:
    runs = []
    for schedule in ("1f1b", "interleaved_1f1b"):
        with init_empty_weights():
            model = llama(2)
        ap = build(mesh, model, pp_schedule=schedule, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"no values yet.*materialize\(\)"):
            ap.step(**make_batch())
        ap.materialize(seed=4)
        runs.append(ap.step(**make_batch()).loss.item())
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)
    assert abs(runs[0] - math.log(64)) < 0.5


def test_parameters_are_the_models_own_until_they_are_cast(mesh: DeviceMesh, llama: Llama) -> None:
    model = llama(2)
    mine = {id(p) for p in model.parameters()}
    ap = build(mesh, model, pp_schedule="dfs")
    assert {id(p) for part in ap.parts for p in part.parameters()} == mine
    ap = build(mesh, llama(2), dtype=torch.bfloat16)
    assert {p.dtype for part in ap.parts for p in part.parameters()} == {torch.bfloat16}
    assert math.isfinite(ap.step(**make_batch()).loss.item())


def test_the_bare_schedule(mesh: DeviceMesh, llama: Llama) -> None:
    batch = make_batch()
    batch["target"] = batch["input_ids"].roll(1)  # all count alike
    ap = build(mesh, llama(2), scale_grads_in_schedule=True, pp_seq_len=6)
    _, gradients = whole(llama(2), [batch])
    losses: list[torch.Tensor] = []
    target = batch.pop("target")
    ap.info.schedule.step(batch["input_ids"], target=target, losses=losses, **batch)
    assert len(losses) == 4
    same(ap, gradients)
    with pytest.raises(ValueError, match="seq_len=0"):
        ap.update_seq_len(0)


def test_pipeline_model(mesh: DeviceMesh, llama: Llama) -> None:
    batch = make_batch()
    batch["target"] = batch["input_ids"].roll(1)
    _, gradients = whole(llama(2), [batch])
    schedule, parts, has_first, has_last, stages = pipeline_model(
        llama(2), mesh, pipeline_parallel_schedule="interleaved1f1b", microbatch_size=2,
        local_batch_size=8, loss_fn=token_mean, scale_grads=True,
    )  # fmt: skip
    assert has_first
    assert has_last
    assert [stage.submod for stage in stages] == parts
    target = batch.pop("target")
    schedule.step(batch["input_ids"], target=target, **batch)
    for part in parts:
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)


def test_parallelize_fn_gets_every_part_and_the_axes(mesh: DeviceMesh, llama: Llama) -> None:
    calls: list[tuple[Any, ...]] = []

    def parallelize(model: nn.Module, world_mesh: Any, moe_mesh: Any, **axes: Any) -> None:
        calls.append((model, world_mesh, moe_mesh, axes))
        assert "forward" not in vars(model)  # before the stage's forward is put in place

    ap = AutoPipeline(mesh, pp_schedule="dfs", pp_batch_size=8, dp_axis_names=("pp",))
    ap.build(llama(2), loss_fn=token_mean, parallelize_fn=parallelize)
    assert [call[0] for call in calls] == ap.parts
    for _, world_mesh, moe_mesh, axes in calls:
        assert world_mesh is mesh
        assert moe_mesh is None
        assert axes == {
            "dp_axis_names": ("pp",), "cp_axis_name": None, "tp_axis_name": None,
            "ep_axis_name": None, "ep_shard_axis_names": None,
        }  # fmt: skip


def test_a_config_makes_a_pipeline(mesh: DeviceMesh, llama: Llama) -> None:
    config = PipelineConfig(pp_batch_size=8, pp_microbatch_size=4, loss_fn=token_mean)
    values = config.to_dict()
    loss_fn = values.pop("loss_fn")
    ap = AutoPipeline(mesh, **values).build(llama(2), loss_fn=loss_fn)
    [loss], _ = whole(llama(2), [make_batch()])
    assert ap.step(**make_batch()).loss.item() == pytest.approx(loss, rel=1e-9)


def test_a_csv(mesh: DeviceMesh, llama: Llama, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,1F0,0F2,1B0,0B0,0F1,1F1,1I1,1F2,1W1,0B1,0F3,1F3,1B3,1B2,0B3,0B2\n")
    _, gradients = whole(llama(3), [make_batch()])
    ap = build(mesh, llama(3), pp_schedule=None, pp_schedule_csv=str(path))
    ap.step(**make_batch())
    same(ap, gradients)
    assert str(path) in ap.debug_summary()


# --- reports


def test_reports(mesh: DeviceMesh, llama: Llama) -> None:
    model = llama(3)
    model.model.embed_tokens.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    frozen = model.model.embed_tokens.weight.numel()
    ap = build(mesh, model, pp_schedule="interleaved_1f1b")
    info = ap.info
    assert [f.name for f in dataclasses.fields(info)][:4] == [
        "enabled", "schedule", "has_first_stage", "has_last_stage"
    ]  # fmt: skip
    assert not info.enabled
    assert info.has_first_stage
    assert info.has_last_stage
    assert info.model_parts == ap.parts
    assert [stage.stage_index for stage in info.stages] == [0, 1]
    first, last = ap.list_stage_modules()
    assert first == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"
    ]  # fmt: skip
    assert last == ["model.layers.2", "model.norm", "lm_head", "model.rotary_emb"]
    counts = ap.get_stage_param_counts()
    assert counts == [sum(p.numel() for p in part.parameters()) for part in ap.parts]
    assert sum(counts) == ap.get_total_param_count() == total
    assert ap.get_total_param_count(trainable_only=True) == total - frozen
    assert ap.get_stage_param_counts(trainable_only=True) == [counts[0] - frozen, counts[1]]
    summary = ap.debug_summary()
    for words in (
        "1 ranks, 2 stages",
        "interleaved_1f1b (ScheduleInterleaved1F1B), 4 microbatches of 2, expected bubble 0.0 %",
        f"{total:,} parameters, {total - frozen:,} trainable",
        f"stage 1: {counts[1]:,} parameters ({100 * counts[1] / total:.1f} % of the model)",
    ):
        assert words in summary
    head, *rows = ap.pretty_print_stages(max_modules_per_stage=2).splitlines()
    assert head.split() == ["stage", "rank", "parameters", "share", "modules"]
    assert rows[0].endswith("model.embed_tokens, model.layers.0-1, and 1 more")
    assert rows[1].endswith("model.layers.2, model.norm, and 2 more")


def test_a_picture_of_the_schedule(mesh: DeviceMesh, llama: Llama, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedule.png"
    build(mesh, llama(2)).visualize_current_schedule(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_other_pictures_of_the_schedule(mesh: DeviceMesh, llama: Llama, tmp_path: Path) -> None:
    ap = build(mesh, llama(2))
    for suffix, begins in (
        ("html", "<!doctype html>"),
        ("json", '{"traceEvents":['),
        ("txt", "1f1b, 1 stages\nrank 0 F0 B0"),
    ):
        path = tmp_path / f"schedule.{suffix}"
        ap.visualize_current_schedule(path)
        assert path.read_text(encoding="utf-8").startswith(begins)
    with pytest.raises(ValueError, match=r"\.pdf.*one of \.png, \.html, \.json, \.txt"):
        ap.visualize_current_schedule(tmp_path / "schedule.pdf")
    assert not (tmp_path / "schedule.pdf").exists()


# --- errors


@pytest.mark.parametrize(
    "ask",
    [
        lambda ap: ap.parts, lambda ap: ap.info, lambda ap: ap.debug_summary(),
        lambda ap: ap.pretty_print_stages(), lambda ap: ap.materialize(),
        lambda ap: ap.step(torch.zeros(8, 4, dtype=torch.long)), lambda ap: ap.update_seq_len(4),
    ],
)  # fmt: skip
def test_before_build(ask: Callable[[AutoPipeline], Any], mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"call build\(model, loss_fn=...\) first"):
        ask(AutoPipeline(mesh, pp_batch_size=8))


def test_what_is_wrong_with_settings_is_said_at_once(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="AutoPipeline cannot be made") as caught:
        AutoPipeline(
            mesh, pp_axis_name="pipe", tp_axis_name="tp", pp_batch_size=8, pp_microbatch_size=3,
            pp_recv_buffer_pool_slack=-1, layers_per_stage=1, module_fqns_per_model_part=[["a"]],
        )  # fmt: skip
    for words in ("pp_axis_name='pipe'", "tp_axis_name='tp'", "('pp',)", "6 or 9", "slack=-1",
                  "contradicts"):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ({}, {"pp_schedule": "1f2b"}, ["'1f2b'", "'1f1b'"]),
        ({}, {"pp_schedule": None}, ["both None"]),
        ({}, {"layers_per_stage": 2}, ["2 stages per rank", "interleaved"]),
        (
            {},
            {"module_fqns_per_model_part": [["model.embed_tokens", "model.layer.0"], ["lm_head"]]},
            ["exactly 1 stage per rank", "lists 2 stages", "did you mean 'model.layers.0'",
             "no stage lists 'model.norm'"],
        ),
        (
            {},
            {"pp_schedule": "dualpipev", "pp_batch_size": 1, "pp_microbatch_size": 1},
            ["at least two microbatches per rank (2)", "pp_batch_size is 1 unless given"],
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_built(
    overrides: dict[str, Any],
    options: dict[str, Any],
    words: list[str],
    mesh: DeviceMesh,
    llama: Llama,
) -> None:
    with pytest.raises(ValueError, match=r"schedule|pipeline|Pipeline") as caught:
        build(mesh, llama(3, **overrides), **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_tied_model_runs_as_one_stage(mesh: DeviceMesh, llama: Llama) -> None:
    _, gradients = whole(llama(2, tie_word_embeddings=True), [make_batch()])
    ap = build(mesh, llama(2, tie_word_embeddings=True))
    ap.step(**make_batch())
    same(ap, gradients)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": torch.zeros(6, 6, dtype=torch.long)}, ["6 rows", "pp_batch_size=8"]),
        ({"target": None}, ["target is missing"]),
        ({"target": torch.zeros(7, 6, dtype=torch.long)}, ["(7, 6)", "(8, 6)"]),
        ({"input_ids": torch.zeros(8, dtype=torch.long)}, ["(8,)", "[rows, length]"]),
        ({"attention_mask": torch.ones(5, 6)}, ["attention_mask", "(5, 6)"]),
        ({"input_ids": torch.tensor(3)}, ["0 rows", "()"]),
    ],
)
def test_wrong_batches(
    change: dict[str, Any], words: list[str], mesh: DeviceMesh, llama: Llama
) -> None:
    ap = build(mesh, llama(2))
    with pytest.raises(ValueError, match="cannot") as caught:
        ap.step(**{**make_batch(), **change})
    assert all(word in str(caught.value) for word in words), caught.value
    assert ap.step(**make_batch()).loss is not None  # nothing is left behind


def test_a_step_without_gradients(mesh: DeviceMesh, llama: Llama) -> None:
    ap = build(mesh, llama(2))
    with torch.no_grad(), pytest.raises(ValueError, match=r"use eval\(\)"):
        ap.step(**make_batch())


def test_an_evaluation_of_rows_that_make_no_microbatches(mesh: DeviceMesh, llama: Llama) -> None:
    ap = build(mesh, llama(2))
    with pytest.raises(ValueError, match=r"3 rows.*pp_microbatch_size=2"):
        ap.eval(make_batch(rows=3)["input_ids"])


def test_a_loss_of_neither_kind(mesh: DeviceMesh, llama: Llama) -> None:
    def shifting(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return token_mean(logits[:, :-1], target[:, 1:])

    with pytest.raises(ValueError, match="loss_reduction='mean'"):
        build(mesh, llama(2), shifting)
    build(mesh, llama(2), shifting, loss_reduction="mean")


def test_settings_without_effect_are_warned_of(
    mesh: DeviceMesh, llama: Llama, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pp_autopipeline.checks._warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            build(
                mesh, llama(2), defer_fsdp_grad_sync=False,
                patch_stage_backward_maybe_with_nosync=True,
            )  # fmt: skip
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) == 3
    for words in (
        "'pp' of world_mesh has size 1",
        "defer_fsdp_grad_sync=False",
        "maybe_with_nosync",
    ):
        assert any(words in message for message in messages)


def test_a_pool_that_has_nothing_to_receive_is_warned_of(
    mesh: DeviceMesh, llama: Llama, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pp_autopipeline.checks._warned", set())
    with caplog.at_level(logging.WARNING):
        ap = build(mesh, llama(2), pp_schedule="dfs", pp_recv_buffer_pool=True)
    wanted = "pp_recv_buffer_pool has no effect"
    assert any(wanted in record.getMessage() for record in caplog.records)
    _, gradients = whole(llama(2), [make_batch()])
    ap.step(**make_batch())
    same(ap, gradients)
