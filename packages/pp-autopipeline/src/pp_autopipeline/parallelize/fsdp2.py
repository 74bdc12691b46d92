"""Sharding a stage over data-parallel ranks with torch's `fully_shard`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pp_autopipeline import transformers_private
from pp_autopipeline.parallelize.config import FSDP2Config, MoEParallelizerConfig
from pp_autopipeline.parallelize.shared_gradients import scale_gradients
from pp_autopipeline.parallelize.whole_backward import keep_backward_whole
from pp_split_hf import stage_part


def shard_experts(
    experts: Sequence[nn.Module],
    mesh: DeviceMesh,
    replicas: int,
    config: FSDP2Config,
    moe: MoEParallelizerConfig,
) -> None:
    """Shard experts over the ranks that hold the same ones.

    Args:
        experts: Modules that expert parallelism has spread.
        mesh: The ranks that hold the same experts; one alone is fine.
        replicas: Ranks with different tokens, by which gradients are divided: those that reached
            an expert come from more batches than `mesh` has ranks.
        config: Dtypes and offloading.
        moe: What is different for experts.
    """
    policies = _policies(config)
    if moe.mp_policy is not None:
        policies["mp_policy"] = moe.mp_policy
    for module in experts:
        # Not by FSDP: on one rank it divides float64 and float16 twice (2.13 to 2.15), and on more
        # a factor other than their number takes a reduction that NCCL alone has.
        scale_gradients(module, 1.0 / replicas)
        unit = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=moe.reshard_after_forward or bool(config.reshard_after_forward),
            **policies,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(mesh.size() > 1)


def shard_stage(part: nn.Module, mesh: DeviceMesh, config: FSDP2Config, in_pipeline: bool) -> None:
    """Shard a stage: its layers, embedding, norm and head by themselves, the rest with the root.

    Args:
        part: The stage's module.
        mesh: The ranks to shard over; with two axes, copies over the first.
        config: How.
        in_pipeline: Whether there is more than one pipeline rank, so that a stage runs many
            microbatches at a time.
    """
    policies = _policies(config)
    units = _units(part, config)
    odd_policies = {**policies}
    if config.mp_policy is not None:  # what a model keeps in another dtype computes in it
        odd_policies["mp_policy"] = replace(config.mp_policy, param_dtype=None)
    stage = stage_part(part)
    assert stage is not None
    layers = [part.get_submodule(name) for name in stage.layout.layer_fqns]
    last_layer = next((m for m in reversed(layers) if any(True for _ in m.parameters())), None)
    for module in units:
        reshard = config.reshard_after_forward
        if reshard is None:
            reshard = not in_pipeline and module is not last_layer
        for odd in _of_other_dtypes(module):
            fully_shard(odd, mesh=mesh, reshard_after_forward=reshard, **odd_policies)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **policies)
    kept: set[nn.Parameter] = set()
    if config.multimodal.frozen_sharding == "replicate":
        kept = {p for module in _frozen_encoders(part) for p in module.parameters()}
    for odd in _of_other_dtypes(part):
        reshard = config.reshard_after_forward
        fully_shard(odd, mesh=mesh, reshard_after_forward=reshard, **odd_policies)
    policy = config.mp_policy
    if policy is not None and policy.output_dtype in (None, policy.param_dtype):
        # What comes from another stage, or as a keyword; unless the residual stream is to stay in
        # a higher dtype, under autocast.
        policies["mp_policy"] = replace(policy, cast_forward_inputs=True)
    fully_shard(
        part,
        mesh=mesh,
        reshard_after_forward=bool(config.reshard_after_forward),
        ignored_params=kept or None,
        **policies,
    )
    if config.enable_fsdp2_prefetch:
        _prefetch(part, config)
    if not config.defer_fsdp_grad_sync:
        reduce_every_microbatch(part)


def reduce_every_microbatch(part: nn.Module) -> bool:
    """Have a sharded stage's gradients reduced after every microbatch.

    torch's stages (2.13 to 2.15) turn the reduction off before each backward and run it once at the
    end of the step; on this object it stays on. Gradients that were reduced accumulate as shards.

    Returns:
        Whether the stage is sharded.
    """
    if not isinstance(part, FSDPModule):
        return False
    keep_backward_whole(
        part, "with defer_fsdp_grad_sync=False gradients are reduced at the end of each backward"
    )
    set_sync = part.set_requires_gradient_sync
    set_sync(True)
    object.__setattr__(
        part, "set_requires_gradient_sync", lambda on, *args, **kwargs: set_sync(True)
    )
    return True


def _policies(config: FSDP2Config) -> dict[str, Any]:
    policies: dict[str, Any] = {"mp_policy": config.mp_policy}
    if config.offload_policy is not None:
        policies["offload_policy"] = config.offload_policy
    return policies


def _units(part: nn.Module, config: FSDP2Config) -> list[nn.Module]:
    """Return what is gathered by itself, inner modules first, else in the order of the model."""
    stage = stage_part(part)
    assert stage is not None
    layout = stage.layout
    plan = transformers_private.plan_of(part, "fsdp_plan")
    names = list(transformers_private.expand_plan(part, plan)) if plan else []
    names += [fqn for fqn in layout.layer_fqns if fqn not in names]
    frozen = _frozen_encoders(part)
    modules = dict(part.named_modules())
    in_frozen = {inner for module in frozen for inner in module.modules()}
    by_layer = config.multimodal.frozen_sharding == "per_layer"
    chosen = [
        name
        for name in dict.fromkeys(names)
        if name in modules
        and any(True for _ in modules[name].parameters())
        and (by_layer or modules[name] not in in_frozen)
    ]
    chosen.sort(key=lambda name: -name.count("."))
    # A weight that two of them have, as a tied embedding, is left to the root.
    owners = Counter(id(p) for name in chosen for p in modules[name].parameters())
    shared = {number for number, count in owners.items() if count > 1}
    return [
        modules[name]
        for name in chosen
        if not isinstance(modules[name], FSDPModule)
        and not any(id(p) in shared for p in modules[name].parameters())
    ]


def _frozen_encoders(part: nn.Module) -> list[nn.Module]:
    """Return towers and projectors of which every parameter is frozen."""
    stage = stage_part(part)
    assert stage is not None
    modules = dict(part.named_modules())
    towers = [modules[name] for name in stage.layout.multimodal_encoders if name in modules]
    return [
        tower
        for tower in towers
        if list(tower.parameters()) and not any(p.requires_grad for p in tower.parameters())
    ]


def _of_other_dtypes(module: nn.Module) -> list[nn.Module]:
    """Return modules inside whose parameters have another dtype than most: FSDP wants one alone."""
    count: Counter[torch.dtype] = Counter()
    owners: dict[torch.dtype, list[nn.Module]] = {}
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            continue
        for parameter in inner.parameters(recurse=False):
            count[parameter.dtype] += parameter.numel()
            owners.setdefault(parameter.dtype, []).append(inner)
    if len(count) < 2:
        return []
    most = count.most_common(1)[0][0]
    odd = dict.fromkeys(m for dtype, found in owners.items() if dtype != most for m in found)
    return [m for m in odd if m is not module]


def _prefetch(part: nn.Module, config: FSDP2Config) -> None:
    # Layers alone: what has run already would be gathered for nothing, and be stale at the next
    # step.
    stage = stage_part(part)
    assert stage is not None
    layers = [part.get_submodule(name) for name in stage.layout.layer_fqns]
    chain: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    ahead, back = config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth
    for number, unit in enumerate(chain):
        if following := chain[number + 1 : number + 1 + ahead]:
            unit.set_modules_to_forward_prefetch(following)
        if preceding := chain[max(0, number - back) : number][::-1]:
            unit.set_modules_to_backward_prefetch(preceding)
