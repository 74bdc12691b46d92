"""From a whole model to this rank's stages and the schedule that runs them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from pp_autopipeline.automatic import choose_automatically
from pp_autopipeline.checks import mesh_problems, order_problems, refuse, schedule_problems
from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.layer_counts import BalanceBy, choose_layer_counts
from pp_autopipeline.loss import BatchLoss
from pp_autopipeline.parallelize.whole_backward import keep_backwards_whole
from pp_autopipeline.stage_numbers import count_stages, place_stages
from pp_patch_hf import patch_hf_model_for_pp
from pp_schedule import (
    Balance,
    Order,
    build_order_schedule,
    build_pipeline_schedule,
    resolve_schedule,
    set_stage_shapes,
)
from pp_schedule.schedule_csv import load_csv
from pp_split_hf import (
    BoundaryShape,
    ModelLayout,
    Tie,
    TiedParameters,
    check_pipeline_support,
    check_stage_fqns,
    find_layout,
    find_ties,
    move_stages,
    plan_stage_fqns,
    split_model_into_stages,
    stage_part,
)


class ParallelizeFnProtocol(Protocol):
    """Further parallelism for one stage's module, applied in place.

    Its return value is not used, but for a module that wraps this one, as DDP does: that is what
    the stage then runs.
    """

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
    ties: tuple[Tie, ...]
    """Parameters that more than one stage holds."""
    balance: Balance | None = None
    """How even the stages are, if costs decided."""
    schedule: str = ""
    """What runs: a name or a file; `own` for an order that the planner made."""
    order: Order | None = None
    """What to run, if neither a name nor a file says so."""

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
    tied: TiedParameters
    """What this rank holds of parameters that other stages hold too."""


def plan_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    pp_axis_name: str,
    config: PipelineConfig,
    balance: BalanceBy = "layers",
    compute_dtype: torch.dtype | None = None,
) -> PipelinePlan:
    """Decide which modules are on which stage and which stage on which rank.

    Every rank decides alike. `compute_dtype` is what stages compute in, if it is not the dtype of
    their parameters.

    Raises:
        ValueError: Listing everything about mesh, schedule, sizes, model and plan that is wrong.
    """
    failed = "cannot build the pipeline"
    refuse(failed, mesh_problems(mesh, "world_mesh", {"pp_axis_name": pp_axis_name}))
    pp_size, pp_rank = mesh[pp_axis_name].size(), mesh[pp_axis_name].get_local_rank()
    problems: list[str] = []
    # 1. How the model is laid out.
    layout = None
    try:
        layout = find_layout(model, compute_dtype or config.dtype)
    except (ValueError, RuntimeError) as error:
        problems += check_pipeline_support(model) or [str(error)]
    # 2. What the schedule wants.
    order, spec = None, None
    if config.pp_schedule_csv is None:
        spec = resolve_schedule(config.pp_schedule or "")
    else:
        try:
            order = load_csv(config.pp_schedule_csv)
        except (OSError, ValueError) as error:
            problems.append(f"pp_schedule_csv={config.pp_schedule_csv!r} cannot be read: {error}")
    if order is not None:
        problems += order_problems(
            order, str(config.pp_schedule_csv), pp_size, config.num_microbatches
        )
    if layout is None or (order is None and spec is None):
        refuse(failed, problems)
    assert layout is not None
    weighed, schedule, planned = None, config.pp_schedule_csv or config.pp_schedule or "", None
    if spec is not None and spec.name == "auto" and config.module_fqns_per_model_part is None:
        refuse(failed, problems + check_pipeline_support(model, layout))
        try:
            chosen = choose_automatically(model, layout, pp_size, config, balance)
        except (ValueError, RuntimeError) as error:
            refuse(failed, [f"pp_schedule='auto': {error}"])
        config, weighed, schedule = chosen.config, chosen.balance, chosen.schedule
        order = planned = chosen.order
        spec = None if order else resolve_schedule(config.pp_schedule or "")
    # 3. Both together.
    num_stages = count_stages(config, spec, order, layout, pp_size, problems)
    if num_stages is None:
        refuse(failed, problems + check_pipeline_support(model, layout))
    assert num_stages is not None
    if spec is not None:
        problems += schedule_problems(spec, pp_size, num_stages, config)
    listed = config.module_fqns_per_model_part
    if listed is not None:
        problems += check_stage_fqns(layout, listed, model)
    refuse(failed, problems + check_pipeline_support(model, layout))
    stage_ids = place_stages(spec, order, pp_size, num_stages)
    # 4. Which modules are on which stage.
    if listed is None:
        try:
            counts, weighed = choose_layer_counts(model, layout, stage_ids, config, balance)
        except ValueError as error:
            refuse(failed, [str(error)])
        listed = plan_stage_fqns(layout, counts)
    names = [list(stage) for stage in listed]
    ties = find_ties(model, layout, names)
    return PipelinePlan(layout, names, stage_ids, pp_rank, ties, weighed, schedule, planned)


def build_pipeline(
    model: nn.Module,
    plan: PipelinePlan,
    mesh: DeviceMesh,
    pp_axis_name: str,
    config: PipelineConfig,
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    device: torch.device,
    parallelize: Callable[[nn.Module], Any] | None,
) -> BuiltPipeline:
    """Build this rank's stages of a planned pipeline. Nothing is sent."""
    # 1. The modules, sharing every tensor with the model.
    mine = sorted(plan.stage_ids[plan.pp_rank])
    parts = split_model_into_stages(model, plan.stage_fqns, mine, plan.layout)
    # 2. Onto the device; meta parameters get their values later.
    move_stages(parts, device, config.dtype)
    # 3. Whatever else is to be done to a part, then its forward, so that the boundary is outermost.
    run_as = []
    for part in parts:
        wrapped = None if parallelize is None else parallelize(part)
        run_as.append(wrapped if isinstance(wrapped, nn.Module) and _wraps(wrapped, part) else part)
        patch = patch_hf_model_for_pp(part, config.patch_inner_model, config.patch_causal_lm_model)
        if parallelize is not None:
            _send_what_is_expected(part)
        if isinstance(loss_fn, BatchLoss):
            loss_fn.take_auxiliary_loss = (
                patch.take_auxiliary_loss
            )  # of the last stage, if it is mine
    # 4. torch's stages and schedule around them.
    group = mesh.get_group(pp_axis_name)
    num_stages = len(plan.stage_fqns)
    stages = [
        PipelineStage(
            wrapped, index, num_stages, device, group=group, dw_builder=_weight_backward(part)
        )
        for wrapped, part, index in zip(run_as, parts, mine, strict=True)
    ]
    how = (
        config.pp_microbatch_size,
        config.pp_batch_size,
        stages,
        loss_fn,
        config.scale_grads_in_schedule,
    )
    if plan.order is not None:
        schedule = build_order_schedule(plan.order, *how)
    else:
        file = config.pp_schedule_csv
        schedule = build_pipeline_schedule(file, None if file else plan.schedule, *how)
    keep_backwards_whole(stages, parts, schedule)
    by_stage = dict(zip(mine, parts, strict=True))
    tied = TiedParameters(plan.ties, by_stage, plan.rank_of_stage, group)
    return BuiltPipeline(plan, parts, stages, schedule, tied)


def _send_what_is_expected(module: nn.Module) -> None:
    """Have a part's outputs in the dtypes that the next stage has memory for.

    Autocast and mixed precision compute in others than the trace of the model has shown.
    """
    part = stage_part(module)
    assert part is not None
    if part.is_last:
        return
    dtypes = [slot.shape.dtype for slot in part.layout.trace.crossings[part.end_layer].slots]

    def cast(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return output.to(dtypes[0])
        pairs = zip(output, dtypes, strict=True)
        return tuple(each.to(dtype) if torch.is_tensor(each) else each for each, dtype in pairs)

    module.register_forward_hook(cast)


def _wraps(wrapper: nn.Module, part: nn.Module) -> bool:
    """Tell whether a module is another one around a stage's."""
    return getattr(wrapper, "module", None) is part


def _weight_backward(module: nn.Module) -> Callable[[], Callable[..., None]] | None:
    """Return what keeps a stage's backward in one piece, where it must be.

    Schedules that split the backward compute the weights' half from the nodes at which weights
    meet the inputs; with several tensors in or out those halves overlap, and torch (2.13 to 2.15)
    runs backward twice through what they share.
    """
    part = stage_part(module)
    assert part is not None
    crossings = part.layout.trace.crossings
    entry = 1 if part.is_first else len(crossings[part.first_layer].slots)
    exit_ = 1 if part.is_last else len(crossings[part.end_layer].slots)
    return (lambda: lambda *args: None) if max(entry, exit_) > 1 else None


def bind_parallelize_fn(
    parallelize_fn: ParallelizeFnProtocol | None, **meshes_and_axes: Any
) -> Callable[[nn.Module], Any] | None:
    """Return a function of a part alone."""
    return None if parallelize_fn is None else partial(parallelize_fn, **meshes_and_axes)


def output_shape(layout: ModelLayout) -> BoundaryShape:
    """Return the shape of what the model returns: logits, or hidden states without a head."""
    for fqn in ("", *layout.heads[-1:]):
        output = layout.trace.outputs.get(fqn)
        if isinstance(output, BoundaryShape):
            return output
    exit_: BoundaryShape = layout.trace.crossings[-1].slots[0].shape
    return exit_


def set_shapes(pipeline: BuiltPipeline, microbatch_size: int, seq_len: int) -> None:
    """Tell every local stage the shapes of a microbatch, so that torch need not try them out."""
    layout = pipeline.plan.layout
    batch = (microbatch_size, seq_len)
    for stage, module in zip(pipeline.stages, pipeline.parts, strict=True):
        part = stage_part(module)
        assert part is not None
        if part.is_first:
            entry = [torch.empty(batch, dtype=torch.long, device="meta")]
        else:
            entry = _crossing(layout, part.first_layer, batch)
        if part.is_last:
            # Only its existence matters: the last stage sends nothing on.
            exit_ = [output_shape(layout).tensor(*batch)]
        else:
            exit_ = _crossing(layout, part.end_layer, batch)
        set_stage_shapes(stage, entry, exit_)


def _crossing(layout: ModelLayout, boundary: int, batch: tuple[int, int]) -> list[torch.Tensor]:
    return [slot.shape.tensor(*batch) for slot in layout.trace.crossings[boundary].slots]
