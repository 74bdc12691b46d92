"""Where chained stages first leave the path of the whole model: output by output, module by module."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pp_patch_hf.patch import patch_hf_model_for_pp
from pp_patch_hf.verify import chained_stages, relative_error
from pp_split_hf import ModelLayout, accepts, find_layout, main_output, plan_stage_fqns
from pp_split_hf.shapes import tensors_in

_Call = tuple[str, int]
"""FQN of a module, and the how-manieth of its calls."""


@dataclass(frozen=True)
class Difference:
    """The first module whose output is another one in the stages."""

    fqn: str
    """Its name; empty for the model itself."""
    stage: int
    """The stage that owns it."""
    error: float
    """Largest absolute difference over the largest absolute value; infinite if its stage did not
    call it, or returned something of another shape."""


def first_difference(
    model: nn.Module,
    layer_counts: Sequence[int],
    inputs: dict[str, torch.Tensor],
    rtol: float = 1e-5,
) -> Difference | None:
    """Return the first module, in the order in which the whole model finishes them, that differs.

    Every module is compared on the stage that owns it: innermost modules first, a layer after what
    is inside it, and the modules around the layers on the last stage. Modules without parameters
    beside the layers, such as rotary tables, belong to every stage and are not compared. Where a
    layer's first module is named, what it was given differs already: the code before that layer
    needs something that does not cross the boundary.

    Args:
        model: A whole model with real weights, in evaluation mode; it is not changed.
        layer_counts: Layers per stage.
        inputs: `input_ids` and whatever else its forward takes.
        rtol: The largest error relative to the largest value that counts as equal.

    Returns:
        The difference, or None if all outputs are equal; gradients may still differ.

    Raises:
        ValueError: If the model cannot be cut like this.
    """
    layout = find_layout(model)
    owner = _owners(layout, layer_counts)
    whole = copy.deepcopy(model)
    stages = chained_stages(model, layout, layer_counts)
    wanted: dict[_Call, list[torch.Tensor]] = {}
    got: dict[_Call, list[torch.Tensor]] = {}
    _record(whole, lambda fqn: owner(fqn) is not None, wanted)
    for stage, part in enumerate(stages):
        _record(part, lambda fqn, stage=stage: owner(fqn) == stage, got)  # type: ignore[misc]
    with torch.no_grad():
        whole(**inputs, **({"use_cache": False} if accepts(whole.forward, "use_cache") else {}))
        _run_chained(stages, inputs)
    for call, outputs in wanted.items():
        error = _largest_error(outputs, got.get(call))
        stage_index = owner(call[0])
        if error > rtol and stage_index is not None:
            return Difference(call[0], stage_index, error)
    return None


def _owners(layout: ModelLayout, layer_counts: Sequence[int]) -> Callable[[str], int | None]:
    """Return a function that tells the stage of a module, None if it is on all of them."""
    plan = plan_stage_fqns(layout, layer_counts)
    homes = {
        fqn: stage for stage, fqns in enumerate(plan) for fqn in fqns if fqn not in layout.shared
    }

    def owner(fqn: str) -> int | None:
        if not fqn or layout.layers.startswith(f"{fqn}."):
            return len(plan) - 1
        names = fqn.split(".")
        units = (".".join(names[:end]) for end in range(1, len(names) + 1))
        return next((homes[unit] for unit in units if unit in homes), None)

    return owner


def _run_chained(stages: list[nn.Module], inputs: dict[str, torch.Tensor]) -> None:
    for stage in stages:
        patch_hf_model_for_pp(stage)
    crossing: Any = (inputs["input_ids"],)
    for stage in stages:
        sent = stage(*crossing, **inputs)
        crossing = sent if isinstance(sent, tuple) else (sent,)


def _record(
    model: nn.Module, wants: Callable[[str], bool], outputs: dict[_Call, list[torch.Tensor]]
) -> None:
    """Have a model note a copy of what its modules return."""

    def hook_of(fqn: str, holds_layers: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # What else a decoder returns, such as all hidden states, is of its own stage's layers.
            tensors = [main_output(output)] if holds_layers else tensors_in(output)
            number = 0
            while (fqn, number) in outputs:
                number += 1
            # A copy: it may be changed in place later.
            outputs[fqn, number] = [tensor.detach().clone() for tensor in tensors]

        return hook

    for fqn, module in model.named_modules():
        if wants(fqn):
            holds_layers = not fqn or any(
                isinstance(child, nn.ModuleList) for child in module.children()
            )
            module.register_forward_hook(hook_of(fqn, holds_layers))


def _largest_error(wanted: list[torch.Tensor], got: list[torch.Tensor] | None) -> float:
    if got is None or len(got) != len(wanted):
        return float("inf")
    pairs = zip(wanted, got, strict=True)
    return max((relative_error(a.float(), b.float()) for a, b in pairs), default=0.0)
