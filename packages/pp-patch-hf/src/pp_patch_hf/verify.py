"""A check of one's own architecture: the whole model against its chained stages, in one process."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from pp_patch_hf.patch import patch_hf_model_for_pp
from pp_split_hf import (
    ModelLayout,
    accepts,
    find_layout,
    find_router_loss,
    main_output,
    plan_stage_fqns,
    split_model_into_stages,
    validate_hf_model_for_pipeline_support,
)


@dataclass(frozen=True)
class CutReport:
    """How one split compares with the whole model."""

    layer_counts: tuple[int, ...]
    """Layers per stage."""
    logits_error: float
    """Largest absolute difference of the logits, over the largest absolute logit."""
    gradient_error: float
    """The largest such error of any parameter's gradient."""
    worst_parameter: str
    """The parameter that has it."""

    def exact(self, rtol: float) -> bool:
        """Return whether both errors are within `rtol`."""
        return self.logits_error <= rtol and self.gradient_error <= rtol


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_pipeline` returns."""

    cuts: tuple[CutReport, ...]
    """One entry per split."""
    rtol: float
    """What was asked for."""

    @property
    def exact(self) -> bool:
        """Whether every split gives the whole model's logits and gradients."""
        return all(cut.exact(self.rtol) for cut in self.cuts)

    def __str__(self) -> str:
        lines = [f"{'layers per stage':<20}{'logits':>12}{'gradients':>12}  worst parameter"]
        for cut in self.cuts:
            counts = ",".join(map(str, cut.layer_counts))
            lines.append(
                f"{counts:<20}{cut.logits_error:>12.1e}{cut.gradient_error:>12.1e}  "
                f"{cut.worst_parameter}{'' if cut.exact(self.rtol) else '  NOT EXACT'}"
            )
        return "\n".join(lines)


def verify_pipeline(
    model: nn.Module | PretrainedConfig,
    splits: Sequence[Sequence[int]] | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    rtol: float = 1e-5,
    layout: ModelLayout | None = None,
) -> VerifyReport:
    """Compare a model with its chained stages: logits and every gradient, in one process.

    Args:
        model: A whole model with real weights, small enough to run here, or a config to make one
            from. Dropout should be off (`eval()`, or zero in the config): it draws other numbers
            in stages.
        splits: Layers per stage, one entry per split to try; by default every cut into two that the
            model allows.
        inputs: `input_ids` and whatever else its forward takes; by default random ids [2, 8].
        rtol: The largest error relative to the largest value that counts as exact.
        layout: Of the model, if known already; then it is not asked whether it can be cut.

    Returns:
        A report; printed, it is a table.

    Raises:
        ValueError: If the model cannot be cut at all; the message lists why.
    """
    if isinstance(model, PretrainedConfig):
        model = cast(nn.Module, AutoModelForCausalLM.from_config(model).eval())
    if layout is None:
        validate_hf_model_for_pipeline_support(model)
        layout = find_layout(model)
    if splits is None:
        splits = [(cut, layout.num_layers - cut) for cut in layout.trace.cuts]
    if inputs is None:
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        device = next(model.parameters()).device
        ids = torch.randint(0, vocab_size, (2, 8), generator=generator)
        inputs = {"input_ids": ids.to(device)}
    wanted = _run([copy.deepcopy(model)], inputs)
    cuts = []
    for counts in splits:
        cuts.append(
            _compare(tuple(counts), wanted, _run(chained_stages(model, layout, counts), inputs))
        )
    return VerifyReport(tuple(cuts), rtol)


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def chained_stages(model: nn.Module, layout: ModelLayout, counts: Sequence[int]) -> list[nn.Module]:
    """Return the stages of a copy of a model."""
    copied = copy.deepcopy(model)
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(copied, plan, range(len(plan)), layout)


def _run(parts: list[nn.Module], inputs: dict[str, torch.Tensor]) -> Result:
    """Forward through the parts and backward from a fixed projection of the logits."""
    auxiliary = None
    if len(parts) > 1:
        patches = [patch_hf_model_for_pp(part) for part in parts]
        crossing: Any = (inputs["input_ids"],)
        for part in parts:
            sent = part(*crossing, **inputs)
            crossing = sent if isinstance(sent, tuple) else (sent,)
        hidden = crossing[0]
        auxiliary = patches[-1].take_auxiliary_loss()
    else:
        kwargs = {"use_cache": False} if accepts(parts[0].forward, "use_cache") else {}
        output = parts[0](**inputs, **kwargs)
        hidden = main_output(output)
        router = find_router_loss(parts[0])
        if router is not None:
            auxiliary = router.coefficient * output.aux_loss
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(hidden.shape, generator=generator, dtype=torch.float32)
    loss = (hidden * weights.to(hidden)).sum()
    (loss if auxiliary is None else loss + auxiliary).backward()
    gradients = {
        name: parameter.grad
        for part in parts
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    return hidden.detach(), gradients


def _compare(counts: tuple[int, ...], wanted: Result, got: Result) -> CutReport:
    # A gradient that cancels out leaves rounding, which is none of a split's business.
    largest = max((float(g.abs().max()) for g in wanted[1].values() if g.numel()), default=0.0)
    noise = largest * torch.finfo(wanted[0].dtype).eps / 8
    errors = {name: relative_error(g, got[1].get(name), noise) for name, g in wanted[1].items()}
    errors |= {name: float("inf") for name in got[1] if name not in wanted[1]}
    worst = max(errors, key=lambda name: errors[name])
    return CutReport(counts, relative_error(wanted[0], got[0]), errors[worst], worst)


def relative_error(wanted: torch.Tensor, got: torch.Tensor | None, noise: float = 0.0) -> float:
    """Return the largest difference over the largest value wanted; none if it is below `noise`."""
    if got is None or got.shape != wanted.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    difference = float((wanted - got).abs().max())
    error = 0.0 if difference <= noise else difference / (float(wanted.abs().max()) or 1.0)
    return float("inf") if math.isnan(error) else error
