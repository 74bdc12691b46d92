"""Every torch-private name that this package uses, read against torch 2.13.0, 2.14.1 and 2.15.0.

Nothing here decides anything: each function does one thing to torch's objects, so that a torch
release that moves a name is mended in this file alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from pp_schedule.orders import Action, Order

Schedule = _PipelineSchedule
SingleStageSchedule = PipelineScheduleSingle
_FORWARD_KINDS = {"FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD"}


def stages_of(schedule: Schedule) -> list[PipelineStage]:
    """Return the schedule's local stages, by stage index."""
    if isinstance(schedule, PipelineScheduleSingle):
        found = [schedule._stage]
    else:
        assert isinstance(schedule, PipelineScheduleMulti)
        found = list(schedule._stages)
    stages = [stage for stage in found if isinstance(stage, PipelineStage)]
    return sorted(stages, key=lambda stage: int(stage.stage_index))


def num_microbatches_of(schedule: Schedule) -> int:
    """Return the number of microbatches per step."""
    return int(schedule._n_microbatches)


def order_of(schedule: Schedule) -> Order | None:
    """Return the order that a multi-stage schedule runs; None for a single-stage one."""
    if not isinstance(schedule, PipelineScheduleMulti):
        return None
    order = {}
    for rank, actions in schedule.pipeline_order.items():
        flat: list[Action | None] = []
        for action in actions:
            # A fused forward-backward runs its parts one after the other.
            for part in action.sub_actions if action and action.sub_actions else [action]:
                flat.append(None if part is None else _ours(part))
        order[rank] = flat
    return order


def runtime_schedule(
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None,
    order: Order,
) -> _PipelineScheduleRuntime:
    """Return torch's runtime with a given compute-only order, communication filled in by torch."""
    schedule = _PipelineScheduleRuntime(
        list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    schedule.pipeline_order = {
        rank: [None if action is None else _Action.from_str(str(action)) for action in actions]
        for rank, actions in order.items()
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def keep_forwards_only(schedule: _PipelineScheduleRuntime) -> None:
    """Drop all backward work from a runtime schedule, so that its `step` is an evaluation.

    torch refuses an order without backwards, so it gets one with and loses them here.
    """
    schedule._has_backward = False
    schedule.pipeline_order = {
        rank: [a for a in actions if a is None or a.computation_type == _ComputationType.FORWARD]
        for rank, actions in schedule.pipeline_order.items()
    }
    schedule.pipeline_order_with_comms = {
        rank: [a for a in actions if a.computation_type.name in _FORWARD_KINDS]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }


def set_stage_metadata(
    stage: PipelineStage, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Replace a stage's static input and output descriptions, as its constructor made them."""
    stage._user_meta = _StageMeta(
        inputs=extract_tensor_metas(tuple(inputs)), outputs=extract_tensor_metas(tuple(outputs))
    )


def forget_metadata(schedule: Schedule) -> None:
    """Make the schedule read its stages' descriptions again at its next step."""
    if isinstance(schedule, PipelineScheduleSingle):
        schedule._stage_forward_initialized = False
        schedule._stage_backward_initialized = False
    else:
        assert isinstance(schedule, PipelineScheduleMulti)
        schedule._stages_forward_initialized = False
        schedule._stages_backward_initialized = False


def set_keyword_chunks(schedule: Schedule, dims: Mapping[str, int | None]) -> None:
    """Set how each keyword argument is cut: along a dim, or (None) not at all."""
    # torch reads a `_Replicate` here, though it declares chunk specs alone.
    specs: dict[str, Any] = {
        name: _Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in dims.items()
    }
    schedule._kwargs_chunk_spec = specs


def _ours(action: _Action) -> Action:
    kind = {
        _ComputationType.FORWARD: "F",
        _ComputationType.FULL_BACKWARD: "B",
        _ComputationType.BACKWARD_INPUT: "I",
        _ComputationType.BACKWARD_WEIGHT: "W",
    }[action.computation_type]
    assert action.microbatch_index is not None
    return Action(action.stage_index, kind, action.microbatch_index)
