"""Activation checkpointing of a stage's layers, in place: no module is renamed or wrapped."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from pp_autopipeline.parallelize.config import ActivationCheckpointing, CheckpointingScope
from pp_autopipeline.parallelize.whole_backward import keep_backward_whole
from pp_split_hf import stage_part

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
    torch.ops.higher_order.flex_attention,
}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default}
_ROUTING = {_aten.topk.default}
_VISION = re.compile(r"vis|image|patch|video", re.IGNORECASE)


def checkpoint_layers(
    part: nn.Module,
    mode: ActivationCheckpointing,
    scope: CheckpointingScope | Sequence[CheckpointingScope] = "all",
    keep_routing: bool = True,
) -> list[str]:
    """Have layers of a stage compute their activations again in the backward.

    Layers are the decoder layers of the stage, and in vision and audio towers the modules that
    Transformers makes for it. Outputs, gradients and random numbers stay the same.

    Args:
        part: The stage's module.
        mode: True or "full": everything of a layer is computed again. "selective": attention and
            every second matrix product are kept, the rest, which costs little, is computed again.
        scope: Whose layers; with another scope than "all" only those that train.
        keep_routing: With "selective", keep which experts a token goes to.

    Returns:
        Names of the layers.
    """
    if mode is False:
        return []
    contexts = partial(_selective, keep_routing) if mode == "selective" else None
    if mode == "selective":
        keep_backward_whole(
            part,
            "torch recomputes a selectively checkpointed layer once, and a split backward twice; "
            'activation_checkpointing="full" goes with it',
        )
    found = []
    for name, layer in _layers_of(part, [scope] if isinstance(scope, str) else scope):
        _checkpoint(layer, contexts)
        found.append(name)
    return found


def _layers_of(
    part: nn.Module, scopes: Sequence[CheckpointingScope]
) -> Iterator[tuple[str, nn.Module]]:
    stage = stage_part(part)
    assert stage is not None
    layout = stage.layout
    decoder = set(layout.layer_fqns)
    outer: list[str] = []
    for name, module in part.named_modules():
        if any(name.startswith(f"{fqn}.") for fqn in outer):
            continue
        encoder = next((e for e in layout.multimodal_encoders if name.startswith(f"{e}.")), None)
        is_layer = name in decoder or (
            encoder is not None and isinstance(module, GradientCheckpointingLayer)
        )
        parameters = list(module.parameters())
        if not is_layer or not parameters:
            continue
        outer.append(name)
        kinds = {"language"} if name in decoder else {"multimodal"}
        if encoder is not None and _VISION.search(name):
            kinds.add("vision")
        trains = any(parameter.requires_grad for parameter in parameters)
        if "all" in scopes or (trains and kinds & set(scopes)):
            yield name, module


def _checkpoint(layer: nn.Module, contexts: Callable[[], Any] | None) -> None:
    others: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    if isinstance(layer, GradientCheckpointingLayer):
        # Its own forward calls this, and knows which arguments must not be used twice.
        layer.gradient_checkpointing = True
        run = partial(checkpoint, use_reentrant=False, **others)
        object.__setattr__(layer, "_gradient_checkpointing_func", run)
        return
    forward = layer.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **others, **kwargs)

    object.__setattr__(layer, "forward", again)


def _selective(keep_routing: bool) -> Any:
    """Return contexts for one forward of a layer and its repetition."""
    products = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if op in _ATTENTION or (keep_routing and op in _ROUTING):
            return CheckpointPolicy.MUST_SAVE
        if op in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
