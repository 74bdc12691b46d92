"""From a whole model to this rank's stages and the schedule that runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from pp_autopipeline.checks import mesh_problems, plan_num_stages, schedule_problems
from pp_patch_hf import patch_hf_model_for_pp
from pp_schedule import (
    ScheduleSpec,
    build_pipeline_schedule,
    resolve_schedule,
    set_stage_shapes,
    stage_ids_this_rank,
)
from pp_schedule.orders import Order, load_csv
from pp_split_hf import (
    ModelLayout,
    check_pipeline_support,
    check_stage_fqns,
    find_layout,
    plan_stage_fqns,
    split_model_into_stages,
    spread_layers,
    stage_part,
)
from pp_split_hf.initialize import place_stage


class ParallelizeFnProtocol(Protocol):
    """Further parallelism for one stage's module, applied in place; its return value is not used."""

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None,
        *,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
    ) -> Any:
        """Wrap, shard or compile `model` in place."""


@dataclass(frozen=True)
class PipelinePlan:
    """What every rank decides alike, before anything is built."""

    layout: ModelLayout
    """Of the whole model."""
    stage_fqns: list[list[str]]
    """Module names of every stage."""
    stage_ids: dict[int, tuple[int, ...]]
    """Stages of every pipeline rank."""
    pp_rank: int
    """This rank along the pipeline axis."""

    @property
    def rank_of_stage(self) -> list[int]:
        """The pipeline rank of every stage."""
        ranks = {stage: rank for rank, ids in self.stage_ids.items() for stage in ids}
        return [ranks[stage] for stage in range(len(ranks))]


@dataclass(frozen=True)
class BuiltPipeline:
    """This rank's part of a pipeline."""

    plan: PipelinePlan
    parts: list[nn.Module]
    """Stage modules, by stage index."""
    stages: list[PipelineStage]
    """torch's stages around them."""
    schedule: Any
    """torch's schedule."""


def plan_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    pp_axis_name: str,
    *,
    schedule_name: str | None,
    schedule_csv: str | None,
    microbatch_size: int,
    batch_size: int,
    layers_per_stage: int | None,
    round_to_pp_multiple: str | None,
    stage_fqns: Sequence[Sequence[str]] | None,
    dtype: torch.dtype | None,
) -> PipelinePlan:
    """Decide which modules are on which stage and which stage on which rank.

    Raises:
        ValueError: Listing everything about mesh, schedule, sizes, model and plan that is wrong.
    """
    problems = mesh_problems(mesh, {"pp_axis_name": pp_axis_name})
    if problems:
        raise ValueError("cannot build the pipeline:\n  " + "\n  ".join(problems))
    pp_size, pp_rank = mesh[pp_axis_name].size(), mesh[pp_axis_name].get_local_rank()
    order: Order | None = load_csv(schedule_csv) if schedule_csv else None
    spec: ScheduleSpec | None = resolve_schedule(schedule_name or "") if order is None else None
    try:
        layout = find_layout(model, dtype)
    except (ValueError, RuntimeError) as error:
        problems = check_pipeline_support(model) or [str(error)]
        raise ValueError("cannot build the pipeline:\n  " + "\n  ".join(problems)) from error
    try:
        num_stages = plan_num_stages(
            spec, order, layout.num_layers, pp_size, layers_per_stage, round_to_pp_multiple,
            stage_fqns,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"cannot build the pipeline:\n  {error}") from error
    problems = schedule_problems(
        spec, order, pp_size, num_stages, batch_size, microbatch_size, stage_fqns
    )
    if stage_fqns is None:
        names = plan_stage_fqns(layout, spread_layers(layout.num_layers, num_stages))
    else:
        names = [list(stage) for stage in stage_fqns]
        problems += check_stage_fqns(layout, names, model)
    problems += check_pipeline_support(model, layout, names)
    if problems:
        raise ValueError("cannot build the pipeline:\n  " + "\n  ".join(problems))
    return PipelinePlan(layout, names, _stage_ids(spec, order, pp_size, num_stages), pp_rank)


def build_pipeline(
    model: nn.Module,
    plan: PipelinePlan,
    mesh: DeviceMesh,
    pp_axis_name: str,
    *,
    schedule_name: str | None,
    schedule_csv: str | None,
    microbatch_size: int,
    batch_size: int,
    loss_fn: Callable[..., torch.Tensor] | None,
    scale_grads: bool,
    device: torch.device,
    dtype: torch.dtype | None,
    parallelize: Callable[[nn.Module], Any] | None,
    patch_inner_model: bool,
    patch_causal_lm_model: bool,
) -> BuiltPipeline:
    """Build this rank's stages of a planned pipeline. Nothing is sent."""
    # 1. The modules, sharing every tensor with the model.
    mine = sorted(plan.stage_ids[plan.pp_rank])
    parts = split_model_into_stages(model, plan.stage_fqns, mine, plan.layout)
    # 2. Onto the device, if they have values; meta parameters get theirs later.
    for part in parts:
        if not any(p.device.type == "meta" for p in part.parameters()):
            place_stage(part, device, dtype)
    # 3. Whatever else is to be done to a part, then its forward, so that the boundary is outermost.
    for part in parts:
        if parallelize is not None:
            parallelize(part)
        patch_hf_model_for_pp(part, patch_inner_model, patch_causal_lm_model)
    # 4. torch's stages and schedule around them.
    group = mesh.get_group(pp_axis_name)
    num_stages = len(plan.stage_fqns)
    stages = [
        PipelineStage(part, index, num_stages, device, group=group)
        for part, index in zip(parts, mine, strict=True)
    ]
    schedule = build_pipeline_schedule(
        schedule_csv, schedule_name, microbatch_size, batch_size, stages, loss_fn, scale_grads
    )
    return BuiltPipeline(plan, parts, stages, schedule)


def set_shapes(pipeline: BuiltPipeline, microbatch_size: int, seq_len: int) -> None:
    """Tell every local stage the shapes of a microbatch, so that torch need not try them out."""
    layout = pipeline.plan.layout
    for stage, module in zip(pipeline.stages, pipeline.parts, strict=True):
        part = stage_part(module)
        assert part is not None
        ids = torch.empty((microbatch_size, seq_len), dtype=torch.long, device="meta")
        entry = ids if part.is_first else _boundary(layout, part.first_layer, ids)
        exit_ = _boundary(layout, layout.num_layers if part.is_last else part.end_layer, ids)
        if part.is_last and layout.heads and layout.trace.outputs.get(layout.heads[-1]):
            # Only its existence matters: the last stage sends nothing on.
            out_dim, dtype = layout.trace.outputs[layout.heads[-1]] or (1, torch.float32)
            exit_ = torch.empty((*ids.shape, out_dim), dtype=dtype, device="meta")
        set_stage_shapes(stage, [entry], [exit_])


def _boundary(layout: ModelLayout, layer: int, ids: torch.Tensor) -> torch.Tensor:
    trace = layout.trace
    at_end = layer == layout.num_layers
    shape = trace.exit if at_end else trace.boundaries[layout.layer_fqns[layer]]
    assert shape is not None
    return shape.tensor(*ids.shape)


def _stage_ids(
    spec: ScheduleSpec | None, order: Order | None, pp_size: int, num_stages: int
) -> dict[int, tuple[int, ...]]:
    if order is not None:
        return {
            rank: tuple(sorted({a.stage_index for a in row if a is not None}))
            for rank, row in order.items()
        }
    assert spec is not None
    return {
        rank: stage_ids_this_rank(rank, pp_size, num_stages, spec.style) for rank in range(pp_size)
    }
