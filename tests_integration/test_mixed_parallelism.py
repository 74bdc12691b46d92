"""Pipelines beside data, tensor, sequence and expert parallelism train as one process does."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import MAX_NORM, Run, make_optimizer, named, token_mean, token_sum
from tiny_models import tiny_model
from tiny_vlms import VisionCase
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pp_autopipeline import AutoPipeline, ParallelSizes, clip_grad_norm
from pp_autopipeline.parallelize import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MultimodalDistributedConfig,
)
from pp_split_hf import find_layout, plan_stage_fqns

AS_IT_IS = MixedPrecisionPolicy()
ROWS = 8  # of each data-parallel rank


@dataclass(frozen=True)
class Mixed:
    """One training run on several axes."""

    sizes: dict[str, int]
    schedule: str = "1f1b"
    counts: tuple[int, ...] = (2, 1)
    family: str = "llama"
    batch: str = "uneven"
    config: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    loss: str = "mean"

    def model(self) -> torch.nn.Module:
        return tiny_model(self.family, sum(self.counts), torch.float64, **self.overrides)

    def inputs(self, step: int, replicas: int) -> dict[str, Any]:
        """The whole batch of a step."""
        return make_batch(self.batch, ROWS * replicas, 5 + step)

    @property
    def loss_fn(self) -> Any:
        return token_mean if self.loss == "mean" else token_sum


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_mixed(case: Mixed) -> Run:
    """Two AdamW steps on this rank, which sees its part of the batch."""
    config = FSDP2Config(**{"mp_policy": AS_IT_IS, **case.config})
    setup = DistributedSetup.build(config, ParallelSizes(**case.sizes), device_type="cpu")
    model = case.model()
    plan = plan_stage_fqns(find_layout(model), case.counts)
    ap = AutoPipeline(
        **setup.pipeline_axes,
        pp_schedule=case.schedule,
        pp_microbatch_size=2,
        pp_batch_size=ROWS,
        module_fqns_per_model_part=plan,
        **case.options,
    ).build(model, loss_fn=case.loss_fn, parallelize_fn=setup.parallelize_fn)
    optimizer = make_optimizer(ap.parts, torch.float64)
    run = Run([], [], {}, {})
    replica = setup.device_mesh["dp"].get_local_rank()
    for step in range(2):
        batch = case.inputs(step, setup.dp_size)
        mine = {k: v[ROWS * replica : ROWS * (replica + 1)] for k, v in batch.items()}
        loss = ap.step(**mine).loss
        assert loss is not None
        assert ap.eval(**mine).loss is not None
        if step == 0:
            pairs = [(n, p.grad) for part in ap.parts for n, p in named(part)]
            run.gradients = {n: whole(g) for n, g in pairs if g is not None}
        axes = setup.pipeline_axes
        norm = clip_grad_norm(MAX_NORM, ap.parts, device_mesh=axes["world_mesh"])
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.weights = {n: whole(p) for part in ap.parts for n, p in named(part)}
    return run


def run_alone(case: Mixed, replicas: int) -> Run:
    """The same of the unsplit model, with the batches of all ranks."""
    model = case.model()
    optimizer = make_optimizer([model], torch.float64)
    run = Run([], [], {}, {})
    for step in range(2):
        batch = case.inputs(step, replicas)
        target = batch.pop("target")
        loss = case.loss_fn(model(**batch, use_cache=False).logits, target)
        loss.backward()
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in named(model) if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.weights = {name: p.detach() for name, p in named(model)}
    return run


def check(ranks: RankPool, case: Mixed, world_size: int, rtol: float = 1e-9) -> None:
    shared = [case.sizes.get(f"{axis}_size", 1) for axis in ("pp", "tp", "cp")]
    replicas = world_size
    for size in shared:
        replicas //= size
    wanted = run_alone(case, replicas)
    gradients: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    for run in ranks.run(world_size, run_mixed, case, timeout=240):
        for what, found, into, reference in (
            ("gradient", run.gradients, gradients, wanted.gradients),
            ("weight", run.weights, weights, wanted.weights),
        ):
            into |= found
            for name, tensor in found.items():
                error = (tensor - reference[name]).abs().max()
                scale = reference[name].abs().max().clamp(min=1e-6)
                errors[f"{what} {name}"] = float(error / scale)
        for what, values, references in (
            ("norm", run.norms, wanted.norms),
            ("loss", run.losses, wanted.losses),
        ):
            for step, (value, reference_value) in enumerate(zip(values, references, strict=True)):
                errors[f"{what} {step}"] = abs(value - reference_value) / reference_value
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    assert not wrong
    assert gradients.keys() == wanted.gradients.keys()
    assert weights.keys() == wanted.weights.keys()


SCHEDULES = [("1f1b", (2, 1)), ("interleaved_1f1b", (1, 0, 1, 1)), ("v_schedule", (1, 1, 1, 0))]


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
def test_sharded_data_parallel(ranks: RankPool, schedule: str, counts: tuple[int, ...]) -> None:
    check(ranks, Mixed({"pp_size": 2, "dp_size": 2}, schedule, counts), 4)


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tensor_parallel(
    ranks: RankPool, schedule: str, counts: tuple[int, ...], family: str
) -> None:
    check(ranks, Mixed({"pp_size": 2, "tp_size": 2}, schedule, counts, family), 4)


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
def test_sequence_parallel(ranks: RankPool, schedule: str, counts: tuple[int, ...]) -> None:
    config = {"sequence_parallel": True}
    check(ranks, Mixed({"pp_size": 2, "tp_size": 2}, schedule, counts, "qwen3", config=config), 4)


@pytest.mark.parametrize("family", ["jamba", "deepseek_v3", "granitemoe"])
def test_sequence_parallel_where_the_plan_has_no_attention(ranks: RankPool, family: str) -> None:
    """Plans of experts alone; attention and Mamba see all tokens nevertheless."""
    case = Mixed(
        {"tp_size": 2}, "1f1b", (4,), family, "plain", config={"sequence_parallel": True},
        overrides={"experts_implementation": "eager"},
    )  # fmt: skip
    check(ranks, case, 2, rtol=1e-4)  # routers and norms compute in float32


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
def test_expert_parallel(ranks: RankPool, schedule: str, counts: tuple[int, ...]) -> None:
    sizes = {"pp_size": 2, "dp_size": 2, "ep_size": 2}
    check(ranks, Mixed(sizes, schedule, counts, "mixtral"), 4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp_size": 2, "dp_size": 2, "tp_size": 2},
        {"pp_size": 2, "dp_size": 4, "dp_replicate_size": 2},
    ],
    ids=["dp x tp", "hsdp"],
)
def test_eight_ranks(ranks: RankPool, sizes: dict[str, int]) -> None:
    config = {"sequence_parallel": True} if "tp_size" in sizes else {}
    check(ranks, Mixed(sizes, "interleaved_1f1b", (1, 0, 1, 1), "qwen3", config=config), 8)


TOGETHER = {
    "dp x tp": ({"dp_size": 2, "tp_size": 2}, "llama"),
    "dp x tp, experts over dp": ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, "mixtral"),
    "dp x tp, experts over both": ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, "mixtral"),
    "dp, experts over half": ({"dp_size": 4, "ep_size": 2}, "mixtral"),
    "pp x tp, experts over tp": ({"pp_size": 2, "tp_size": 2, "ep_size": 2}, "mixtral"),
    "dp x cp": ({"dp_size": 2, "cp_size": 2}, "llama"),
    "tp x cp": ({"tp_size": 2, "cp_size": 2}, "llama"),
    "dp x cp, experts over both": ({"dp_size": 2, "cp_size": 2, "ep_size": 4}, "mixtral"),
    "pp x cp, experts over cp": ({"pp_size": 2, "cp_size": 2, "ep_size": 2}, "mixtral"),
}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("axes", ["dp x tp", "dp x cp", "pp x tp", "pp x dp", "pp x cp"])
def test_tied_weights(ranks: RankPool, axes: str) -> None:
    """On one stage, or on the first and the last."""
    sizes = {f"{axis}_size": 2 for axis in axes.split(" x ")}
    counts = (2, 1) if "pp_size" in sizes else (3,)
    check(ranks, Mixed(sizes, "1f1b", counts, overrides={**TIED, "num_key_value_heads": 4}), 4)


def residual_stream() -> list[torch.dtype]:
    """What layers get under autocast with a residual stream of float32."""
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
    )
    config = FSDP2Config(mp_policy=policy, autocast_dtype=torch.bfloat16)
    sizes = ParallelSizes(pp_size=2, dp_size=2)
    setup = DistributedSetup.build(config, sizes, device_type="cpu")
    ap = AutoPipeline(
        **setup.pipeline_axes, pp_microbatch_size=2, pp_batch_size=ROWS
    ).build(
        tiny_model("llama", 2, torch.float32),
        loss_fn=token_mean,
        parallelize_fn=setup.parallelize_fn,
    )  # fmt: skip
    seen: list[torch.dtype] = []
    for module in ap.parts[0].modules():
        if type(module).__name__.endswith("LlamaDecoderLayer"):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    loss = ap.step(**make_batch("plain", ROWS, 5)).loss
    assert loss is not None
    assert loss.item() == pytest.approx(4.2, abs=0.5)
    return seen


def test_a_residual_stream_in_float32_stays_so_over_stages(ranks: RankPool) -> None:
    for seen in ranks.run(4, residual_stream):
        assert seen
        assert set(seen) == {torch.float32}


@pytest.mark.parametrize("axes", TOGETHER)
def test_axes_together(ranks: RankPool, axes: str) -> None:
    sizes, family = TOGETHER[axes]
    counts = (2, 1) if "pp_size" in sizes else (3,)
    heads = {"num_key_value_heads": 4}
    check(ranks, Mixed(sizes, "1f1b", counts, family, overrides=heads), 4)


SETTINGS: dict[str, dict[str, Any]] = {
    "a sum": {"loss": "sum"},
    "tied weights": {"overrides": {"tie_word_embeddings": True}},
    "reduced every microbatch": {"config": {"defer_fsdp_grad_sync": False}},
    "reduced every microbatch, by AutoPipeline": {"options": {"defer_fsdp_grad_sync": False}},
    "resharded": {"config": {"reshard_after_forward": True}},
    "prefetched": {"config": {"enable_fsdp2_prefetch": True, "reshard_after_forward": True}},
    "checkpointed": {"config": {"activation_checkpointing": True}},
    "selectively": {"config": {"activation_checkpointing": "selective"}},
    "offloaded": {"config": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "pooled": {"options": {"pp_recv_buffer_pool": True}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("schedule", "counts"), [SCHEDULES[0], SCHEDULES[2]])
def test_settings_change_no_number(
    ranks: RankPool, setting: str, schedule: str, counts: tuple[int, ...]
) -> None:
    check(ranks, Mixed({"pp_size": 2, "dp_size": 2}, schedule, counts, **SETTINGS[setting]), 4)


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_context_parallel(
    ranks: RankPool, schedule: str, counts: tuple[int, ...], family: str
) -> None:
    check(ranks, Mixed({"pp_size": 2, "cp_size": 2}, schedule, counts, family), 4)


# --- dtypes, compiling, and without a pipeline


def test_bfloat16_stays_within_its_own_bound(ranks: RankPool) -> None:
    """FSDP2's default policy: computing in bfloat16, reducing in float32."""
    case = Mixed({"pp_size": 2, "dp_size": 2}, config={"mp_policy": None})
    wanted = run_alone(case, 2)
    for run in ranks.run(4, run_mixed, case):
        assert run.losses == pytest.approx(wanted.losses, rel=2e-2)
        assert run.norms == pytest.approx(wanted.norms, rel=5e-2)
        for name, gradient in run.gradients.items():
            reference = wanted.gradients[name]
            assert (gradient - reference).norm() <= 0.05 * reference.norm(), name


def test_layers_are_compiled(ranks: RankPool) -> None:
    config = {"enable_compile": True, "activation_checkpointing": True}
    # Norms compute in float32, which a compiler may order otherwise.
    check(ranks, Mixed({"pp_size": 2}, "1f1b", (1, 1), config=config), 2, rtol=1e-5)


def replicated(settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two accumulated steps under DDP, without a pipeline."""
    setup = DistributedSetup.build(DDPConfig(**settings), device_type="cpu")
    model = tiny_model("llama", 3, torch.float64)
    if setup.device_mesh["dp"].get_local_rank() == 1:
        torch.nn.init.zeros_(model.get_parameter("lm_head.weight"))  # rank 0's is sent to all
    ap = AutoPipeline(
        **setup.pipeline_axes, pp_microbatch_size=2, pp_batch_size=ROWS
    ).build(model, loss_fn=token_mean, parallelize_fn=setup.parallelize_fn)  # fmt: skip
    assert isinstance(ap.info.stages[0].submod, DistributedDataParallel)
    losses = []
    replica = setup.device_mesh["dp"].get_local_rank()
    for step in range(2):
        batch = make_batch("uneven", 2 * ROWS, 5 + step)
        mine = {k: v[ROWS * replica : ROWS * (replica + 1)] for k, v in batch.items()}
        loss = ap.step(**mine).loss
        assert loss is not None
        losses.append(loss.item())
    gradients = {n: p.grad.clone() for n, p in ap.parts[0].named_parameters() if p.grad is not None}
    return losses, gradients


@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True, "broadcast_buffers": True}],
)
def test_replicas_without_a_pipeline(ranks: RankPool, settings: dict[str, Any]) -> None:
    model = tiny_model("llama", 3, torch.float64)
    wanted = []
    for step in range(2):
        batch = make_batch("uneven", 2 * ROWS, 5 + step)
        target = batch.pop("target")
        loss = token_mean(model(**batch, use_cache=False).logits, target)
        loss.backward()
        wanted.append(loss.item())
    for losses, gradients in ranks.run(2, replicated, settings):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-12)


# --- vision-language models


def frozen_tower(mode: str, checkpointing: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients and the whole parameters of a first stage whose vision tower is frozen."""
    case = VisionCase("llava", "1f1b", (1, 1), "images")
    config = FSDP2Config(
        mp_policy=AS_IT_IS,
        multimodal=MultimodalDistributedConfig(mode),  # type: ignore[arg-type]
        activation_checkpointing=checkpointing,
        activation_checkpointing_scope="vision" if mode == "root" else "all",
    )
    setup = DistributedSetup.build(config, ParallelSizes(pp_size=2, dp_size=2), device_type="cpu")
    model = case.model()
    freeze_tower(model)
    ap = AutoPipeline(
        **setup.pipeline_axes, pp_microbatch_size=2, pp_batch_size=8, layers_per_stage=1
    ).build(model, loss_fn=token_mean, parallelize_fn=setup.parallelize_fn)
    loss = ap.step(**case.inputs(5)).loss  # the same on both replicas
    assert loss is not None
    pairs = [(n, p) for part in ap.parts for n, p in named(part)]
    plain = sum(not isinstance(p, DTensor) for _, p in pairs)
    return loss.item(), {n: whole(p.grad) for n, p in pairs if p.grad is not None}, plain


def freeze_tower(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "vision_tower" in name:
            parameter.requires_grad_(False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["root", "per_layer", "replicate"])
def test_frozen_towers(ranks: RankPool, mode: str, checkpointing: bool) -> None:
    case = VisionCase("llava", "1f1b", (1, 1), "images")
    model = case.model()
    freeze_tower(model)
    batch = case.inputs(5)
    target = batch.pop("target")
    wanted = token_mean(model(**batch, use_cache=False).logits, target)
    wanted.backward()
    references = {n: p.grad for n, p in named(model) if p.grad is not None}
    tower = sum("vision_tower" in name for name, _ in model.named_parameters())
    found: dict[str, torch.Tensor] = {}
    for rank, (loss, gradients, plain) in enumerate(
        ranks.run(4, frozen_tower, mode, checkpointing)
    ):
        assert loss == pytest.approx(wanted.item(), rel=1e-9)
        assert plain == (tower if mode == "replicate" and rank < 2 else 0)
        found |= gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, references[name], rtol=1e-9, atol=1e-12)
    assert found.keys() == references.keys()
