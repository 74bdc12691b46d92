"""From one model to the stages of one rank: the same parameters, without a copy of any."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pp_split_hf.layout import ModelLayout, find_layout
from pp_split_hf.plan import check_stage_fqns
from pp_split_hf.stand_ins import IdentityStandIn, PassThroughLayer, Sizes, ZeroStandIn
from pp_split_hf.torch_private import tensors_of

_STAGE_PART = "_pp_stage_part"


@dataclass(frozen=True)
class StagePart:
    """Which part of the whole model a stage's module is."""

    stage_index: int
    """Global index of the stage."""
    num_stages: int
    """Stages of the whole pipeline."""
    first_layer: int
    """The first layer it owns, or where that would be if it owns none."""
    end_layer: int
    """One past its last layer."""
    layout: ModelLayout
    """Of the whole model."""
    sizes: Sizes
    """The batch that the stage is at: to be set before its forward runs."""
    skeleton: nn.Module
    """The whole model without memory, on the meta device: its names, shapes and rules."""

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the model's output."""
        return self.stage_index == self.num_stages - 1


def split_model_into_stages(
    model: nn.Module,
    stage_fqns: Sequence[Sequence[str]],
    stage_indices: Sequence[int],
    layout: ModelLayout | None = None,
) -> list[nn.Module]:
    """Return the modules of the given stages.

    A stage's module is the whole model's class with its whole structure: what another stage owns
    is replaced by a stand-in without parameters, so names, indices and layer look-ups are those of
    the whole model. Parameters and buffers are the very tensors of the model that was given: no
    weight is copied, on any device. The model itself is not changed.

    Args:
        model: The whole model; may be on the meta device.
        stage_fqns: Module names per stage, for all stages; see `plan_stage_fqns`.
        stage_indices: The stages to build.
        layout: Of the model, if known already.

    Raises:
        ValueError: Naming, entry by entry, what is wrong with the plan.
    """
    layout = layout or find_layout(model)
    problems = check_stage_fqns(layout, stage_fqns, model)
    problems += [
        f"there is no stage {index} among {len(stage_fqns)}"
        for index in stage_indices
        if not 0 <= index < len(stage_fqns)
    ]
    if problems:
        raise ValueError("the stage plan does not fit the model:\n  " + "\n  ".join(problems))
    skeleton = skeleton_of(model)
    return [_build(model, layout, stage_fqns, index, skeleton) for index in stage_indices]


def stage_part(module: nn.Module) -> StagePart | None:
    """Return which part of a model a module is, if `split_model_into_stages` made it."""
    part = getattr(module, _STAGE_PART, None)
    assert part is None or isinstance(part, StagePart)
    return part


def _build(
    model: nn.Module,
    layout: ModelLayout,
    stage_fqns: Sequence[Sequence[str]],
    index: int,
    skeleton: nn.Module,
) -> nn.Module:
    number = {fqn: i for i, fqn in enumerate(layout.layer_fqns)}
    owned = [number[fqn] for fqn in stage_fqns[index] if fqn in number]
    before = sum(fqn in number for names in stage_fqns[:index] for fqn in names)
    sizes = Sizes()
    memo: dict[int, Any] = _shared_tensors(model)
    between = tuple(fqn for fqn, _ in layout.between)
    owned_by_one = (*layout.first_stage, *layout.layer_fqns, *between, *layout.last_stage)
    foreign = [fqn for fqn in owned_by_one if fqn not in stage_fqns[index]]
    for fqn in foreign:
        if not _is_parameter(model, fqn):
            memo[id(model.get_submodule(fqn))] = _stand_in(model, layout, fqn, sizes)
    part = copy.deepcopy(model, memo)
    for fqn in foreign:
        if _is_parameter(model, fqn):
            _drop_parameter(part, fqn)
    for module in part.modules():
        if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
            dtype = layout.trace.crossings[0].slots[0].shape.dtype
            _without_parameters(module, dtype, sizes, is_whole=module is part)
    setattr(
        part,
        _STAGE_PART,
        StagePart(index, len(stage_fqns), before, before + len(owned), layout, sizes, skeleton),
    )
    return part


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return a model of the same modules and names that has all its tensors on the meta device."""
    memo = {
        id(tensor): nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.detach().to("meta")
        for module in model.modules()
        for tensor in tensors_of(module)
    }
    return copy.deepcopy(model, memo)


def _shared_tensors(model: nn.Module) -> dict[int, Any]:
    """A deepcopy memo under which every tensor of the model is its own copy."""
    return {id(tensor): tensor for module in model.modules() for tensor in tensors_of(module)}


def _is_parameter(model: nn.Module, fqn: str) -> bool:
    owner, _, name = fqn.rpartition(".")
    return name in dict(model.get_submodule(owner).named_parameters(recurse=False))


def _drop_parameter(part: nn.Module, fqn: str) -> None:
    """Put zeros that are no part of the state dict where another stage has a parameter."""
    owner, _, name = fqn.rpartition(".")
    module = part.get_submodule(owner)
    shape, dtype = module.get_parameter(name).shape, module.get_parameter(name).dtype
    delattr(module, name)
    # Real zeros, on the meta device too: the code before the layers computes with them.
    module.register_buffer(name, torch.zeros(shape, dtype=dtype, device="cpu"), persistent=False)


def _without_parameters(
    module: PreTrainedModel, dtype: torch.dtype, sizes: Sizes, is_whole: bool
) -> None:
    """Let a model without parameters still say its dtype and device, which are read off them."""
    cls = type(module)
    members: dict[str, Any] = {
        "dtype": property(lambda self: dtype),
        "device": property(lambda self: sizes.device or torch.device("cpu")),
    }
    if not is_whole:  # the whole stage's parameters are the optimizer's
        members["parameters"] = lambda self, recurse=True: iter(
            [nn.Parameter(torch.empty(0, dtype=dtype, device=sizes.device))]
        )
    module.__class__ = type(cls.__name__, (cls,), members)


def _stand_in(model: nn.Module, layout: ModelLayout, fqn: str, sizes: Sizes) -> nn.Module:
    module = model.get_submodule(fqn)
    trace = layout.trace
    if fqn in layout.layer_fqns:
        return PassThroughLayer(module, trace.hidden_keyword, trace.outputs.get(fqn))
    if fqn in layout.embeddings or fqn in dict(layout.between):
        return ZeroStandIn(module, trace.outputs[fqn], sizes)
    return IdentityStandIn(module, trace.outputs.get(fqn))
