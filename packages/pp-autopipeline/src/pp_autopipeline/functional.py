"""The functional way in: a model in, a torch schedule out."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.devices import resolve_device
from pp_autopipeline.pipeline import (
    ParallelizeFnProtocol,
    bind_parallelize_fn,
    build_pipeline,
    plan_pipeline,
)

# How this function calls what a config calls otherwise, for its messages.
_ARGUMENTS = {
    "pp_schedule_csv": "pipeline_parallel_schedule_csv",
    "pp_schedule": "pipeline_parallel_schedule",
    "pp_microbatch_size": "microbatch_size",
    "pp_batch_size": "local_batch_size",
    "round_virtual_stages_to_pp_multiple": "round_to_pp_multiple",
    "PipelineConfig": "pipeline_model",
}


def pipeline_model(
    model: nn.Module,
    world_mesh: DeviceMesh,
    moe_mesh: DeviceMesh | None = None,
    *,
    pp_axis_name: str = "pp",
    dp_axis_names: tuple[str, ...] = ("dp",),
    cp_axis_name: str | None = None,
    tp_axis_name: str | None = None,
    ep_axis_name: str | None = None,
    ep_shard_axis_names: tuple[str, ...] | None = None,
    layers_per_stage: int | None = None,
    pipeline_parallel_schedule_csv: str | None = None,
    pipeline_parallel_schedule: str | None = "1f1b",
    microbatch_size: int = 1,
    local_batch_size: int = 1,
    device: torch.device | str | int | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    parallelize_fn: ParallelizeFnProtocol | None = None,
    module_fqns_per_model_part: list[list[str]] | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    scale_grads: bool = False,
    round_to_pp_multiple: Literal["up", "down"] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, list[nn.Module], bool, bool, list[PipelineStage]]:
    """Split a Hugging Face model and return a torch schedule for it.

    Every rank of the pipeline calls it with the same arguments. The schedule's own `step` takes
    the batch on the first stage's rank and the target on the last's; losses and gradients are
    those of `loss_fn` microbatch by microbatch, to be scaled by the caller (`AutoPipeline` does
    more).

    Returns:
        `(schedule, model_parts, has_first_stage, has_last_stage, stages)` of this rank.

    Raises:
        ValueError: Listing everything that is wrong, before anything is sent.
    """
    try:
        config = PipelineConfig(
            pp_schedule=pipeline_parallel_schedule,
            pp_schedule_csv=pipeline_parallel_schedule_csv,
            pp_microbatch_size=microbatch_size,
            pp_batch_size=local_batch_size,
            layers_per_stage=layers_per_stage,
            round_virtual_stages_to_pp_multiple=round_to_pp_multiple,
            module_fqns_per_model_part=module_fqns_per_model_part,
            patch_inner_model=patch_inner_model,
            patch_causal_lm_model=patch_causal_lm_model,
            scale_grads_in_schedule=scale_grads,
            dtype=dtype,
        )
        plan = plan_pipeline(model, world_mesh, pp_axis_name, config)
    except ValueError as error:
        message = str(error)
        for name, argument in _ARGUMENTS.items():
            message = message.replace(name, argument)
        raise ValueError(message) from error
    built = build_pipeline(
        model,
        plan,
        world_mesh,
        pp_axis_name,
        config,
        loss_fn=loss_fn,
        device=resolve_device(device, world_mesh),
        parallelize=bind_parallelize_fn(
            parallelize_fn,
            world_mesh=world_mesh,
            moe_mesh=moe_mesh,
            dp_axis_names=dp_axis_names,
            cp_axis_name=cp_axis_name,
            tp_axis_name=tp_axis_name,
            ep_axis_name=ep_axis_name,
            ep_shard_axis_names=ep_shard_axis_names,
        ),
    )
    mine = plan.stage_ids[plan.pp_rank]
    last = len(plan.stage_fqns) - 1
    return built.schedule, built.parts, 0 in mine, last in mine, built.stages
