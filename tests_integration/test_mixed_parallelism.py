"""Pipelines beside data, tensor, sequence and expert parallelism train as one process does."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import MAX_NORM, Run, make_optimizer, named, token_mean, token_sum
from tiny_models import tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from pp_autopipeline import AutoPipeline, ParallelSizes, clip_grad_norm
from pp_autopipeline.parallelize import DistributedSetup, FSDP2Config
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
