"""AutoPipeline on two ranks: what a step means, evaluation, lengths, options, errors."""

import gc
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from harness import RankPool
from oracle import Case, build, compare, run_rank, run_whole, token_mean, token_sum
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

from pp_autopipeline import AutoPipeline, PipelineConfig, checks, clip_grad_norm, pipeline_model
from pp_bufferpool.torch_private import PREALLOCATES
from pp_split_hf import find_layout, init_empty_weights, plan_stage_fqns

# torch before 2.15 keeps a receive buffer per microbatch for ever; there the pool is what helps.
KEEPS_BUFFERS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="torch before 2.15 allocates a receive buffer per microbatch",
)
POOLS = [pytest.param(False, marks=KEEPS_BUFFERS), True]
SCHEDULES = {"1f1b": (2, 1), "interleaved_1f1b": (2, 0, 1, 0), "v_schedule": (1, 1, 1, 0)}


def whole_model(batches: list[dict[str, Any]], loss_fn: Any = token_mean) -> tuple[Any, Any]:
    """Losses and summed gradients of the unsplit Llama with three layers."""
    model = tiny_model("llama", 3)
    losses = []
    for batch in batches:
        batch = dict(batch)
        target = batch.pop("target")
        loss = loss_fn(model(**batch, use_cache=False).logits, target)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def gradients_of(ap: AutoPipeline) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.clone()
        for part in ap.parts
        for name, p in part.named_parameters()
        if p.grad is not None
    }


def same(wanted: dict[str, torch.Tensor], ranks: list[dict[str, torch.Tensor]]) -> None:
    got = {name: g for rank in ranks for name, g in rank.items()}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


# --- loss and gradients do not depend on the number of microbatches


def accumulate(case: Case, loss_fn: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    ap = build(case, loss_fn)
    losses = []
    for seed in (5, 6):
        loss = ap.step(**make_batch(case.batch, case.rows, seed)).loss
        assert loss is not None
        losses.append(loss.item())
    return losses, gradients_of(ap)


@pytest.mark.parametrize("loss_fn", [token_mean, token_sum])
@pytest.mark.parametrize("scale_grads_in_schedule", [False, True])
@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_number_of_microbatches_changes_nothing(
    ranks: RankPool, microbatch_size: int, scale_grads_in_schedule: bool, loss_fn: Any
) -> None:
    case = Case(
        "llama", "1f1b", (2, 1), "uneven", microbatch_size=microbatch_size,
        options={"scale_grads_in_schedule": scale_grads_in_schedule},
    )  # fmt: skip
    wanted = whole_model([make_batch("uneven", 8, seed) for seed in (5, 6)], loss_fn)
    runs = ranks.run(2, accumulate, case, loss_fn)
    assert runs[0][0] == runs[1][0] == pytest.approx(wanted[0], rel=1e-9)
    same(wanted[1], [gradients for _, gradients in runs])


def all_ignored(schedule: str, counts: tuple[int, ...]) -> tuple[float, float]:
    ap = build(Case("llama", schedule, counts))
    batch = make_batch("plain", 8)
    loss = ap.step(batch["input_ids"], target=torch.full_like(batch["target"], -100)).loss
    assert loss is not None
    return loss.item(), clip_grad_norm(1.0, ap.parts, device_mesh=ap.world_mesh).item()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_in_which_nothing_counts(ranks: RankPool, schedule: str) -> None:
    assert ranks.run(2, all_ignored, schedule, SCHEDULES[schedule]) == [(0.0, 0.0)] * 2


def microbatch_losses(case: Case) -> tuple[float, list[float]]:
    ap = build(case)
    losses: list[torch.Tensor] = [torch.tensor(7.0)]
    loss = ap.step(**make_batch(case.batch, case.rows), losses=losses).loss
    assert loss is not None
    assert all(not each.requires_grad for each in losses)
    return loss.item(), [each.item() for each in losses]


@pytest.mark.parametrize(("schedule", "last_rank"), [("1f1b", 1), ("v_schedule", 0)])
def test_losses_of_microbatches(ranks: RankPool, schedule: str, last_rank: int) -> None:
    runs = ranks.run(2, microbatch_losses, Case("llama", schedule, SCHEDULES[schedule], "uneven"))
    assert runs[0][0] == runs[1][0]
    assert runs[1 - last_rank][1] == []
    target = make_batch("uneven", 8)["target"].reshape(4, -1)
    counts = (target != -100).sum(1).tolist()
    losses = runs[last_rank][1]
    assert losses[0] == 0.0
    assert counts[0] == 0
    weighted = sum(n * x for n, x in zip(counts, losses, strict=True)) / sum(counts)
    assert weighted == pytest.approx(runs[0][0], rel=1e-6)


# --- evaluation


def train_and_evaluate(case: Case) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    ap = build(case)
    train, other = make_batch("padded", 8, 5), make_batch("padded", 8, 6)
    longer = make_batch("plain", 4, 7, seq_len=11)
    losses = [ap.eval(**other).loss]
    losses.append(ap.step(**train).loss)
    before = gradients_of(ap)
    losses.append(ap.eval(**longer).loss)
    losses.append(ap.eval(**other).loss)
    untouched = all(torch.equal(g, before[n]) for n, g in gradients_of(ap).items())
    losses.append(ap.step(**other).loss)
    modes = all(module.training for part in ap.parts for module in part.modules())
    assert all(loss is not None for loss in losses)
    return (
        [loss.item() for loss in losses if loss is not None],
        gradients_of(ap),
        untouched and modes,
    )


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, "gpipe", "looped_bfs", "zero_bubble", "dualpipev"]
)
def test_evaluation_between_steps(ranks: RankPool, schedule: str) -> None:
    counts = SCHEDULES.get(schedule, (2, 1) if schedule == "gpipe" else (1, 1, 1, 0))
    train, other = make_batch("padded", 8, 5), make_batch("padded", 8, 6)
    longer = make_batch("plain", 4, 7, seq_len=11)
    wanted, _ = whole_model([other, train, longer, other, other])
    _, gradients = whole_model([train, other])
    runs = ranks.run(2, train_and_evaluate, Case("llama", schedule, counts))
    assert runs[0][0] == runs[1][0] == pytest.approx(wanted, rel=1e-9)
    same(gradients, [run[1] for run in runs])
    assert all(run[2] for run in runs)


def evaluate_without_target(case: Case) -> tuple[Any, Any]:
    ap = build(case)
    output = ap.eval(make_batch("plain", 6)["input_ids"])
    return output.loss, output.logits


def test_evaluation_without_target_gives_logits(ranks: RankPool) -> None:
    runs = ranks.run(2, evaluate_without_target, Case("llama", "v_schedule", (1, 1, 1, 0)))
    wanted = tiny_model("llama", 3)(make_batch("plain", 6)["input_ids"]).logits
    assert runs[1] == (None, None)
    assert runs[0][0] is None
    torch.testing.assert_close(runs[0][1], wanted, rtol=1e-9, atol=1e-12)


# --- lengths


def lengths(case: Case, sizes: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    ap = build(case)
    losses = [ap.step(**make_batch("plain", 8, seq_len=size)).loss for size in sizes]
    return [loss.item() for loss in losses if loss is not None], gradients_of(ap)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sequence_length_changes_between_steps(ranks: RankPool, schedule: str) -> None:
    sizes = [6, 4, 8, 8, 5]
    wanted = whole_model([make_batch("plain", 8, seq_len=size) for size in sizes])
    runs = ranks.run(2, lengths, Case("llama", schedule, SCHEDULES[schedule]), sizes)
    assert runs[0][0] == runs[1][0] == pytest.approx(wanted[0], rel=1e-9)
    same(wanted[1], [gradients for _, gradients in runs])


# --- memory


def logits_alive(num_microbatches: int, evaluate: bool) -> int:
    """The most logits-shaped tensors of microbatches that exist while a loss is computed."""
    most = 0

    def counting_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive = [t for t in gc.get_objects() if torch.is_tensor(t) and t.shape == logits.shape]
        most = max(most, len(alive))
        return token_mean(logits, target)

    case = Case("llama", "1f1b", (2, 1), rows=num_microbatches, microbatch_size=1)
    case.options["loss_reduction"] = "mean"
    ap = build(case, counting_loss)
    run = ap.eval if evaluate else ap.step
    assert run(**make_batch("plain", num_microbatches)).logits is None
    return most


def test_no_logits_are_kept_that_nobody_asked_for(ranks: RankPool) -> None:
    few = max(ranks.run(2, logits_alive, 4, False))
    many = max(ranks.run(2, logits_alive, 24, False))
    assert 0 < many == few


def inputs_alive(num_microbatches: int, pool: bool) -> int:
    """The most hidden states that exist on the last rank while a loss is computed."""
    most = 0

    def counting_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal most
        shape = (*logits.shape[:2], 32)
        gc.collect()
        alive = {t.data_ptr() for t in gc.get_objects() if torch.is_tensor(t) and t.shape == shape}
        most = max(most, len(alive))
        return token_mean(logits, target)

    case = Case("llama", "1f1b", (2, 1), rows=num_microbatches, microbatch_size=1)
    case.options.update(loss_reduction="mean", pp_recv_buffer_pool=pool)
    ap = build(case, counting_loss)
    ap.step(**make_batch("plain", num_microbatches))
    return most


@pytest.mark.parametrize("pool", POOLS)
def test_the_last_stage_keeps_no_inputs_of_finished_microbatches(
    ranks: RankPool, pool: bool
) -> None:
    few = max(ranks.run(2, inputs_alive, 4, pool))
    many = max(ranks.run(2, inputs_alive, 24, pool))
    assert 0 < many <= few + 2


def left_after_steps(pool: bool) -> tuple[int, int]:
    """Hidden states and graphs that are alive after steps, with nothing collecting cycles."""
    gc.collect()
    gc.disable()
    case = Case("llama", "1f1b", (2, 1), rows=8, microbatch_size=1)
    case.options.update(pp_recv_buffer_pool=pool)
    ap = build(case)
    for seed in range(4):
        ap.step(**make_batch("plain", 8, seed))
    tensors = [t for t in gc.get_objects() if torch.is_tensor(t)]
    hidden = {t.data_ptr() for t in tensors if t.shape == (1, 8, 32)}
    graphs = [t for t in tensors if t.grad_fn is not None]
    gc.enable()
    return len(hidden), len(graphs)


@pytest.mark.parametrize("pool", POOLS)
def test_steps_leave_nothing_behind(ranks: RankPool, pool: bool) -> None:
    for hidden, graphs in ranks.run(2, left_after_steps, pool):
        assert hidden <= 7, "more than receive buffers"  # slots of the pool: 2 x (1 + slack)
        assert graphs == 0


# --- options


@pytest.mark.parametrize(
    "options",
    [
        {"pp_recv_buffer_pool": True, "pp_recv_buffer_pool_slack": 0},
        {"pp_recv_buffer_pool": True},
        {"pp_seq_len": 8},
        {"device": "cpu", "dtype": torch.float64},
    ],
)
def test_options_change_no_number(ranks: RankPool, options: dict[str, Any]) -> None:
    case = Case("llama", "1f1b", (2, 1), "uneven", options=options)
    compare(run_whole(case), ranks.run(2, run_rank, case), rtol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "layer_counts"),
    [
        ("gpipe", (1, 2)),
        ("interleaved_1f1b", (2, 0, 1, 0)),
        ("zero_bubble", (1, 1, 1, 0)),
        ("v_schedule", (1, 1, 1, 0)),
    ],
)
def test_a_pool_changes_no_number(
    ranks: RankPool, schedule: str, layer_counts: tuple[int, ...]
) -> None:
    options = {"pp_recv_buffer_pool": True, "pp_recv_buffer_pool_slack": 0}
    case = Case("llama", schedule, layer_counts, "uneven", options=options)
    compare(run_whole(case), ranks.run(2, run_rank, case), rtol=1e-9)


def pool_warnings(slack: int) -> list[str]:
    checks._warned.clear()  # of other tests in this process
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pp_autopipeline.receive_pool").addHandler(handler)
    options = {"pp_recv_buffer_pool": True, "pp_recv_buffer_pool_slack": slack}
    build(Case("llama", "1f1b", (2, 1) if dist.get_world_size() == 2 else (3,), options=options))
    return messages


def test_a_pool_that_saves_nothing_says_so_once(ranks: RankPool) -> None:
    first, second = ranks.run(2, pool_warnings, 0)
    assert (len(first), second) == (0 if PREALLOCATES else 1, [])
    first, second = ranks.run(2, pool_warnings, 100)
    assert len(first) == 1
    assert "saves no memory here: with pp_recv_buffer_pool_slack=100" in first[0]
    assert second == []
    ((message,),) = ranks.run(1, pool_warnings, 2)
    assert "no effect" in message


def checkpointed(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny_model("llama", 3)
    model.gradient_checkpointing_enable()
    model.train()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    plan = plan_stage_fqns(find_layout(model), case.layer_counts)
    ap = AutoPipeline(
        mesh, pp_schedule=case.schedule, pp_microbatch_size=2, pp_batch_size=8,
        module_fqns_per_model_part=plan,
    ).build(model, loss_fn=token_mean)  # fmt: skip
    loss = ap.step(**make_batch("padded", 8)).loss
    assert loss is not None
    return [loss.item()], gradients_of(ap)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "v_schedule"])
def test_gradient_checkpointing(ranks: RankPool, schedule: str) -> None:
    wanted = whole_model([make_batch("padded", 8)])
    runs = ranks.run(2, checkpointed, Case("llama", schedule, SCHEDULES[schedule]))
    assert runs[0][0] == pytest.approx(wanted[0], rel=1e-9)
    same(wanted[1], [gradients for _, gradients in runs])


def two_pipelines() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pooled = build(Case("llama", "1f1b", (2, 1), options={"pp_recv_buffer_pool": True}))
    plain = build(Case("llama", "gpipe", (1, 2)))
    losses = []
    for ap in (pooled, plain, pooled, plain):
        loss = ap.step(**make_batch("plain", 8)).loss
        assert loss is not None
        losses.append(loss.item())
    return losses, gradients_of(pooled), gradients_of(plain)


def test_two_pipelines_in_one_process(ranks: RankPool) -> None:
    wanted = whole_model([make_batch("plain", 8)] * 2)
    runs = ranks.run(2, two_pipelines)
    assert runs[0][0] == pytest.approx(wanted[0] * 2, rel=1e-9)
    same(wanted[1], [run[1] for run in runs])
    same(wanted[1], [run[2] for run in runs])


class StageFriendly(LlamaForCausalLM):
    """A model whose own forward takes and returns stage tensors: ids or states in, one tensor out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.model.embed_tokens(x) if not x.is_floating_point() else x
        positions = torch.arange(x.shape[1])[None]
        rotary = self.model.rotary_emb(x, position_ids=positions)
        mask = create_causal_mask(self.config, x, None, None, position_ids=positions)
        for layer in self.model.layers:
            x = layer(x, attention_mask=mask, position_embeddings=rotary)
        return self.lm_head(self.model.norm(x))


def unpatched(counts: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny_model("llama", 3)
    plan = plan_stage_fqns(find_layout(model), counts)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    ap = AutoPipeline(
        mesh, pp_microbatch_size=2, pp_batch_size=8, module_fqns_per_model_part=plan,
        patch_inner_model=False, patch_causal_lm_model=False,
    ).build(model, loss_fn=token_mean, parallelize_fn=become_stage_friendly)  # fmt: skip
    loss = ap.step(**make_batch("plain", 8)).loss
    assert loss is not None
    return [loss.item()], gradients_of(ap)


def become_stage_friendly(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    model.__class__ = StageFriendly


def test_a_model_that_is_stage_friendly_itself(ranks: RankPool) -> None:
    wanted = whole_model([make_batch("plain", 8)])
    runs = ranks.run(2, unpatched, (2, 1))
    assert runs[0][0] == pytest.approx(wanted[0], rel=1e-9)
    same(wanted[1], [gradients for _, gradients in runs])


def built_twice() -> tuple[list[float], bool, bool]:
    model = tiny_model("llama", 3)
    before = {name: (p, p.dtype, p.device) for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    options: dict[str, Any] = {"pp_microbatch_size": 2, "pp_batch_size": 8}
    narrow = AutoPipeline(mesh, dtype=torch.bfloat16, **options).build(model, loss_fn=token_mean)
    same_model = all((p, p.dtype, p.device) == before[name] for name, p in model.named_parameters())
    wide = AutoPipeline(mesh, **options).build(model, loss_fn=token_mean)
    losses = [ap.step(**make_batch("plain", 8)).loss for ap in (narrow, wide)]
    shared = all(p is before[n][0] for part in wide.parts for n, p in part.named_parameters())
    return [loss.item() for loss in losses if loss is not None], same_model, shared


def test_build_does_not_change_the_model(ranks: RankPool) -> None:
    [wanted], _ = whole_model([make_batch("plain", 8)])
    for losses, same_model, shared in ranks.run(2, built_twice):
        assert losses[0] == pytest.approx(wanted, rel=2e-2)
        assert losses[1] == pytest.approx(wanted, rel=1e-9)
        assert same_model
        assert shared


# --- from nothing, and the functional way


def initialized(counts: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], float]:
    with init_empty_weights():
        model = tiny_model("llama", 3, torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("pp",))
    plan = plan_stage_fqns(find_layout(model), counts)
    ap = AutoPipeline(mesh, pp_batch_size=8, module_fqns_per_model_part=plan, dtype=torch.float64)
    ap.build(model, loss_fn=token_mean).materialize(seed=3)
    weights = {n: p.detach().clone() for part in ap.parts for n, p in part.named_parameters()}
    assert all(weight.dtype == torch.float64 for weight in weights.values())
    loss = ap.step(**make_batch("plain", 8)).loss
    assert loss is not None
    return weights, loss.item()


def test_weights_from_nothing_are_the_same_on_any_number_of_ranks(ranks: RankPool) -> None:
    one = ranks.run(1, initialized, (3,))
    two = ranks.run(2, initialized, (1, 2))
    four = ranks.run(4, initialized, (1, 1, 0, 1))
    same(one[0][0], [run[0] for run in two])
    same(one[0][0], [run[0] for run in four])
    assert one[0][1] == pytest.approx(two[0][1], rel=1e-6)
    assert one[0][1] == pytest.approx(four[0][1], rel=1e-6)


def functional(by_hand: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny_model("llama", 3)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule, parts, has_first, has_last, stages = pipeline_model(
        model, mesh, pipeline_parallel_schedule="interleaved1f1b", microbatch_size=2,
        local_batch_size=8, loss_fn=token_mean, scale_grads=True,
    )  # fmt: skip
    assert len(stages) == len(parts) == 2
    batch = make_batch("plain", 8)
    args = (batch["input_ids"],) if has_first else ()
    losses: list[torch.Tensor] = []
    kwargs = {} if by_hand else {"input_ids": batch["input_ids"]}
    for _ in range(2):
        schedule.step(
            *args, target=batch["target"] if has_last else None,
            losses=losses if has_last else None, return_outputs=False, **kwargs,
        )  # fmt: skip
    gradients = {n: p.grad for part in parts for n, p in part.named_parameters()}
    return [loss.item() for loss in losses], gradients


@pytest.mark.parametrize("by_hand", [True, False])
def test_pipeline_model_with_the_bare_schedule(ranks: RankPool, by_hand: bool) -> None:
    wanted = whole_model([make_batch("plain", 8)] * 2)
    runs = ranks.run(2, functional, by_hand)
    assert sum(runs[1][0]) / 4 == pytest.approx(wanted[0][0], rel=1e-9)
    same(wanted[1], [gradients for _, gradients in runs])


# --- reports


def reports() -> tuple[str, str, list[int], int, list[list[str]], list[bool]]:
    ap = build(Case("llama", "v_schedule", (2, 0, 1, 0)))
    info = ap.info
    flags = [info.enabled, info.has_first_stage, info.has_last_stage]
    return (
        ap.debug_summary(), ap.pretty_print_stages(), ap.get_stage_param_counts(),
        ap.get_total_param_count(), ap.list_stage_modules(), flags,
    )  # fmt: skip


def test_reports_speak_of_the_whole_pipeline(ranks: RankPool) -> None:
    first, second = ranks.run(2, reports)
    model = tiny_model("llama", 3)
    total = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert first[2] == second[2]
    assert first[2][1] == 0
    assert first[2][2] == layer
    assert first[3] == second[3] == total == sum(first[2])
    assert first[1] == second[1]
    assert f"{total:,} parameters" in first[0]
    assert f"{total:,} parameters" in second[0]
    assert "stages 1, 2" in second[0]
    assert first[4] == [
        ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"],
        ["model.norm", "lm_head", "model.rotary_emb"],
    ]
    assert first[5] == [True, True, True]
    assert second[5] == [True, False, False]


# --- errors, the same on every rank and before anything is sent


def wrong_batch(change: dict[str, Any]) -> None:
    ap = build(Case("llama", "1f1b", (2, 1)))
    ap.step(**{**make_batch("plain", 8), **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": torch.zeros(6, 8, dtype=torch.long)}, ["6 rows", "pp_batch_size=8"]),
        ({"target": None}, ["target is missing"]),
        ({"target": torch.zeros(7, 8, dtype=torch.long)}, ["(7, 8)", "(8, 8)"]),
        ({"input_ids": torch.zeros(8, dtype=torch.long)}, ["(8,)", "[rows, length]"]),
        ({"target": torch.zeros(8, 7, dtype=torch.long)}, ["(8, 7)", "(8, 8)"]),
        ({"target": torch.full((8, 8), 64)}, ["target", "64", "0 to 63, or -100"]),
        ({"input_ids": torch.full((8, 8), 64)}, ["input_ids", "64", "0 to 63"]),
        ({"input_ids": torch.zeros(8, 8)}, ["input_ids", "torch.float32"]),
        ({"labels": torch.zeros(8, 8, dtype=torch.long)}, ["labels", "target="]),
        ({"attention_masks": torch.ones(8, 8)}, ["attention_masks", "attention_mask?"]),
        ({"causal_mask_mapping": {"full": torch.ones(8, 8)}}, ["causal_mask_mapping", "dict"]),
        ({"attention_mask": torch.ones(5, 8)}, ["attention_mask", "(5, 8)"]),
        ({"position_ids": torch.arange(8)}, ["position_ids", "(8,)"]),
    ],
)
def test_wrong_batches(ranks: RankPool, change: dict[str, Any], words: list[str]) -> None:
    for kind, message in ranks.run_expecting_error(2, wrong_batch, change, timeout=30):
        assert kind == "ValueError"
        assert all(word in message for word in words), message


def wrong_build(family: str, overrides: dict[str, Any], options: dict[str, Any]) -> None:
    model = tiny_model(family, 3, **overrides)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    AutoPipeline(mesh, **{"pp_batch_size": 8, **options}).build(model, loss_fn=token_mean)


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ({}, {"pp_schedule": "1f2b"}, ["'1f2b'", "'1f1b'"]),
        ({}, {"pp_batch_size": 1}, ["at least one microbatch per stage (2), not 1", "pp_batch_size"]),
        ({}, {"pp_batch_size": 8, "pp_microbatch_size": 3}, ["pp_batch_size=8", "6 or 9"]),
        ({}, {"pp_axis_name": "pipe"}, ["'pipe'", "('pp',)"]),
        ({}, {"layers_per_stage": 1}, ["num_layers=3", "3 stages", "pp_size=2"]),
        ({}, {"pp_schedule": "zbv", "layers_per_stage": 1, "round_virtual_stages_to_pp_multiple": "up",
              "pp_batch_size": 3, "pp_microbatch_size": 2}, ["pp_batch_size=3"]),
        ({}, {"module_fqns_per_model_part": [["model.embed_tokens"]] * 4}, ["exactly 1 stage per rank",
              "4", "stage 1 lists 'model.embed_tokens'", "no stage lists 'lm_head'"]),
        ({}, {"module_fqns_per_model_part": [["model.embed_tokens", "model.layer.0"], ["lm_head"]]},
             ["'model.layer.0'", "did you mean 'model.layers.0'", "no stage lists 'model.norm'"]),
        ({}, {"layers_per_stage": 1, "module_fqns_per_model_part": [[], []]}, ["contradicts"]),
        ({}, {"device": "cuda:0"}, ["cuda", "cpu"]),
        ({}, {"pp_recv_buffer_pool_slack": -1}, ["pp_recv_buffer_pool_slack=-1"]),
        ({}, {"pp_schedule_csv": "/nowhere.csv"}, ["/nowhere.csv"]),
        ({}, {"loss_reduction": "average"}, ["loss_reduction='average'"]),
        ({}, {"pp_schedule": "1f2b", "layers_per_stage": -1, "dtype": "bfloat16",
              "round_virtual_stages_to_pp_multiple": "sideways", "pp_seq_len": "8"},
             ["'1f2b'", "layers_per_stage=-1", "'bfloat16'", "'sideways'", "pp_seq_len='8'"]),
        ({}, {"module_fqns_per_model_part": ["model.embed_tokens", "lm_head"]}, ["list of stages"]),
        ({}, {"dp_axis_names": ("dpp",)}, ["dp_axis_names[0]='dpp'"]),
    ],
)  # fmt: skip
def test_wrong_settings(
    ranks: RankPool, overrides: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    for kind, message in ranks.run_expecting_error(
        2, wrong_build, "llama", overrides, options, timeout=30
    ):
        assert kind in ("ValueError", "FileNotFoundError")
        assert all(word in message for word in words), message


def too_long_for_learned_positions() -> None:
    ap = build(Case("gpt2", "1f1b", (2, 1)))
    ap.step(**make_batch("plain", 8, seq_len=65))


def test_a_sequence_longer_than_learned_positions(ranks: RankPool) -> None:
    for kind, message in ranks.run_expecting_error(2, too_long_for_learned_positions, timeout=30):
        assert kind == "ValueError"
        assert "length 65" in message
        assert "64" in message


def ranks_disagree(what: str) -> None:
    rank = torch.distributed.get_rank()
    counts = (2, 1) if what != "split" or rank else (1, 2)
    rows = 4 if what == "batch" and rank else 8
    schedule = "gpipe" if what == "schedule" and rank else "1f1b"
    build(Case("llama", schedule, counts, rows=rows)).step(**make_batch("plain", rows))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("split", "modules per stage of pipeline ranks 1"),
        ("batch", "batch and microbatch size of pipeline ranks 1"),
        ("schedule", "schedule of pipeline ranks 1"),
    ],
)
def test_ranks_that_were_given_different_things(ranks: RankPool, what: str, words: str) -> None:
    for kind, message in ranks.run_expecting_error(2, ranks_disagree, what, timeout=30):
        assert kind == "ValueError"
        assert words in message


def step_without_weights() -> None:
    with init_empty_weights():
        model = tiny_model("llama", 3)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    ap = AutoPipeline(mesh, pp_batch_size=8).build(model, loss_fn=token_mean)
    ap.step(**make_batch("plain", 8))


def test_a_step_before_there_are_weights(ranks: RankPool) -> None:
    for kind, message in ranks.run_expecting_error(2, step_without_weights, timeout=30):
        assert kind == "ValueError"
        assert "materialize()" in message


def test_a_config_has_what_autopipeline_takes() -> None:
    import dataclasses

    known = {field.name for field in dataclasses.fields(AutoPipeline)} | {"loss_fn"}
    assert {field.name for field in dataclasses.fields(PipelineConfig)} <= known
