"""The unsplit model and the pipelined one, trained alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from batches import make_batch
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh

from pp_autopipeline import AutoPipeline, clip_grad_norm
from pp_split_hf import find_layout, plan_stage_fqns

MAX_NORM = 0.5
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Case:
    """One training run."""

    family: str
    schedule: str
    layer_counts: tuple[int, ...]
    batch: str = "plain"
    rows: int = 8
    microbatch_size: int = 2
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    by_microbatch: bool = False
    """Run the unsplit model over the same microbatches, for models whose float32 parts feel it."""
    balance: Any = None
    """What is to decide how many layers each stage has; `layer_counts` then tells their sum alone."""

    def __str__(self) -> str:
        counts = "".join(map(str, self.layer_counts))
        return f"{self.family}-{self.schedule}-{counts}-{self.batch}"

    def model(self) -> torch.nn.Module:
        return tiny_model(self.family, sum(self.layer_counts), self.dtype, **self.overrides)

    def inputs(self, seed: int) -> dict[str, Any]:
        return make_batch(self.batch, self.rows, seed)


@dataclass
class Run:
    """What a run came to: per step the loss and the norm, the first gradients, the last weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def token_sum(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )


def run_whole(case: Case) -> Run:
    """Two AdamW steps of the unsplit model, with clipping."""
    model = case.model()
    optimizer = make_optimizer([model], case.dtype)
    run = Run([], [], {}, {})
    for step in range(2):
        batch = case.inputs(seed=5 + step)
        target = batch.pop("target")
        loss = _whole_loss(model, case, batch, target)
        if step == 0:
            run.gradients = _gradients([model])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.weights = {name: p.detach() for name, p in named(model)}
    return run


def _whole_loss(
    model: torch.nn.Module, case: Case, batch: dict[str, Any], target: torch.Tensor
) -> torch.Tensor:
    """Forward and backward of the unsplit model, over the whole batch or by microbatch."""
    rows = case.microbatch_size if case.by_microbatch else case.rows
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, case.rows, rows):
        part = batch  # of images, which have other rows, only the whole is known to fit
        if case.by_microbatch:
            part = {name: value[start : start + rows] for name, value in batch.items()}
        output = model(**part, use_cache=False)
        labels = target[start : start + rows]
        loss = token_sum(output.logits, labels) / (target != -100).sum()
        if getattr(model.config, "output_router_logits", False):
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss * rows / case.rows
        loss.backward()
        total += loss.detach()
    return total


def run_rank(case: Case) -> Run:
    """The same on one rank of a pipeline; to be run by the pool."""
    ap = build(case)
    optimizer = make_optimizer(ap.parts, case.dtype)
    run = Run([], [], {}, {})
    for step in range(2):
        batch = case.inputs(seed=5 + step)
        loss = ap.step(**batch).loss
        assert loss is not None
        if step == 0:
            run.gradients = _gradients(ap.parts)
        norm = clip_grad_norm(MAX_NORM, ap.parts, device_mesh=ap.world_mesh)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    run.weights = {n: p.detach() for part in ap.parts for n, p in named(part)}
    return run


def named(part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under all of their names: of a tied one, each stage has its own."""
    return part.named_parameters(remove_duplicate=False)


def make_optimizer(parts: Sequence[torch.nn.Module], dtype: torch.dtype) -> torch.optim.Optimizer:
    """AdamW over the parts; a rank whose stages own nothing trains a scalar of its own.

    Adam's first update is the gradient's sign: in float32 a gradient that is zero but for rounding
    would move a weight by the whole learning rate, one way or the other. A larger eps keeps
    rounding as small as it is.
    """
    parameters = list({id(p): p for part in parts for p in part.parameters()}.values())
    eps = 1e-8 if dtype == torch.float64 else 1e-3
    return torch.optim.AdamW(parameters or [torch.zeros(1)], lr=LEARNING_RATE, eps=eps)


def build(case: Case, loss_fn: Any = token_mean) -> AutoPipeline:
    """The pipeline of a case on this rank."""
    model = case.model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("pp",))
    if case.balance is not None:
        split = {"balance": case.balance}
    else:
        plan = plan_stage_fqns(find_layout(model), case.layer_counts)
        split = {"module_fqns_per_model_part": plan}
    return AutoPipeline(
        mesh,
        pp_schedule=case.schedule,
        pp_microbatch_size=case.microbatch_size,
        pp_batch_size=case.rows,
        **split,
        **case.options,
    ).build(model, loss_fn=loss_fn)


def compare(whole: Run, ranks: Sequence[Run], rtol: float) -> float:
    """Assert that all ranks together did what the whole model did; return the largest error."""
    for run in ranks[1:]:
        assert run.losses == ranks[0].losses, "the ranks report different losses"
        assert run.norms == ranks[0].norms, "the ranks report different gradient norms"
    gradients = _union([run.gradients for run in ranks])
    weights = _union([run.weights for run in ranks])
    assert gradients.keys() == whole.gradients.keys()
    assert weights.keys() == whole.weights.keys()
    errors = {f"gradient of {n}": _error(whole.gradients[n], g) for n, g in gradients.items()}
    errors |= {
        f"weight {n} after two steps": _error(whole.weights[n], w) for n, w in weights.items()
    }
    for name, wanted, got in (
        ("loss", whole.losses, ranks[0].losses),
        ("norm", whole.norms, ranks[0].norms),
    ):
        for step in range(2):
            errors[f"{name} of step {step}"] = abs(wanted[step] - got[step]) / abs(wanted[step])
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= rtol, f"{worst}: relative error {errors[worst]:.1e} > {rtol:.0e}"
    return errors[worst]


def _error(wanted: torch.Tensor, got: torch.Tensor) -> float:
    # A gradient that is zero but for rounding, as of a key's bias, has no relative error.
    return float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-6))


def _gradients(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for part in parts for name, p in named(part) if p.grad is not None}


def _union(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    union: dict[str, torch.Tensor] = {}
    for part in parts:
        assert not union.keys() & part.keys(), "two ranks have the same parameter"
        union |= part
    return union
