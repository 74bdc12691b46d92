"""Every torch-private name that this package uses, read against torch 2.13.0, 2.14.1 and 2.15.0.

Nothing here decides anything: each function does one thing to torch's objects, so that a torch
release that moves a name is mended in this file alone.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _StageMeta,
    extract_tensor_metas,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from pp_schedule.lowering import Dialect, Instruction, Program, computations, lower
from pp_schedule.orders import Action, Order

Schedule = _PipelineSchedule
SingleStageSchedule = PipelineScheduleSingle
_KINDS_2_13 = {
    *("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD", "OVERLAP_F_B"),
    *("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"),
}
_KINDS_SINCE_2_15 = {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"}
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
    return _flat(schedule.pipeline_order)


def order_of_class(
    schedule_class: type[Schedule],
    stage_ids: Sequence[int],
    pp_size: int,
    num_stages: int,
    num_microbatches: int,
) -> Order:
    """Return the order of a multi-stage class, without stages or process groups.

    The constructors ask of a stage no more than where it is; what they do last, lowering, is left
    out.

    Args:
        schedule_class: A class with an order of its own.
        stage_ids: The stages of rank 0.
        pp_size: Number of ranks.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Microbatches per step.
    """
    places = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_rank=0,
            group_size=pp_size,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=nn.Identity(),
        )
        for index in stage_ids
    ]
    schedule = schedule_class.__new__(schedule_class)
    assert isinstance(schedule, _PipelineScheduleRuntime)
    vars(schedule)["_prepare_schedule_with_comms"] = lambda actions: None
    construct: Callable[..., None] = schedule_class.__init__
    construct(schedule, places, n_microbatches=num_microbatches, scale_grads=False)
    return _flat(schedule.pipeline_order)


def _flat(pipeline_order: Mapping[int, Sequence[_Action | None]]) -> Order:
    order = {}
    for rank, actions in pipeline_order.items():
        flat: list[Action | None] = []
        for action in actions:
            # A fused forward-backward runs its parts one after the other.
            for part in action.sub_actions if action and action.sub_actions else [action]:
                flat.append(None if part is None else _ours(part))
        order[rank] = flat
    return order


def dialect() -> Dialect | None:
    """Return how the installed torch lowers an order to a program; None if it is not known."""
    kinds = set(_ComputationType.__members__)
    if kinds == _KINDS_2_13:
        return "2.13"
    return "2.15" if kinds == _KINDS_2_13 | _KINDS_SINCE_2_15 else None


def named_schedule(
    schedule_class: type[Schedule],
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Schedule:
    """Return a schedule of one of torch's multi-stage classes, lowered in linear time.

    The constructors end in `self._prepare_schedule_with_comms`, which is quadratic in the
    microbatches. While it runs, this one object has an attribute of that name, which is found
    before the method of the class.
    """
    schedule = schedule_class.__new__(schedule_class)
    assert isinstance(schedule, _PipelineScheduleRuntime)
    if dialect() is not None:
        vars(schedule)["_prepare_schedule_with_comms"] = partial(_prepare, schedule)
    # torch types its schedules' constructors differently; all take these names.
    construct: Callable[..., None] = schedule_class.__init__
    construct(
        schedule, list(stages), n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    vars(schedule).pop("_prepare_schedule_with_comms", None)
    return schedule


def runtime_schedule(
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None,
    order: Order,
) -> _PipelineScheduleRuntime:
    """Return torch's runtime with a given order, its communication filled in."""
    schedule = _PipelineScheduleRuntime(
        list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    theirs = {kind.value: kind for kind in _ComputationType}
    schedule.pipeline_order = {
        rank: [a and _Action(a.stage_index, theirs[a.kind], a.microbatch) for a in actions]
        for rank, actions in order.items()
    }
    if dialect() is None:
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    else:
        _prepare(schedule, schedule.pipeline_order)
    return schedule


def order_as_program(order: Order, num_microbatches: int) -> Program:
    """Return the program that the installed torch runs for an order."""
    known = dialect()
    if known is None:
        new = sorted(set(_ComputationType.__members__) - _KINDS_2_13 - _KINDS_SINCE_2_15)
        raise NotImplementedError(f"torch {torch.__version__} has actions unknown here: {new}")
    return lower(computations(order), num_microbatches, known, Instruction)


def _prepare(schedule: _PipelineScheduleRuntime, actions: dict[int, list[_Action | None]]) -> None:
    """Do what torch's `_prepare_schedule_with_comms` does with its default options.

    But for DualPipeV's fused pairs, which are taken apart: torch runs their parts one after the
    other anyway, and sends the forward's output on only when the backward has ended. Without that
    wait a step is 2 to 4 % shorter.
    """
    schedule._validate_and_set_stage_mapping(actions)
    known = dialect()
    assert known is not None
    kinds = {kind.value: kind for kind in _ComputationType}
    schedule.pipeline_order_with_comms = lower(
        {
            rank: [part for a in row if a is not None for part in a.sub_actions or (a,)]
            for rank, row in actions.items()
        },
        schedule._n_microbatches,
        known,
        lambda stage, kind, microbatch: _Action(stage, kinds[kind], microbatch),
    )


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


def has_backward(schedule: Schedule) -> bool:
    """Whether the schedule's next call runs backwards."""
    return bool(schedule._has_backward)


def is_described(stage: PipelineStage, backward: bool) -> bool:
    """Whether the user has said what enters and leaves a stage, so that no trial forward is run."""
    return not InferenceMode.needs_dynamic(stage._user_meta, backward)


def set_up_description(stage: PipelineStage) -> Any:
    """Return what a stage was set up with: what enters and leaves it, gradients included."""
    return copy(stage._stage_meta)


def swap_description(stage: PipelineStage, description: Any) -> Any:
    """Replace what the user said of a stage by another description; return the former."""
    before, stage._user_meta = stage._user_meta, description
    return before


def _ours(action: _Action) -> Action:
    assert action.microbatch_index is not None
    return Action(action.stage_index, action.computation_type.value, action.microbatch_index)


foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_div_ = torch._foreach_div_

COMPUTE_LOSS = "_maybe_compute_loss"
"""The method of a schedule that computes a microbatch's loss, after each forward of a stage; its
first argument is the stage."""

RESTORES_BUFFERS = hasattr(PipelineStage, "_pre_metadata_inference_backup")
"""Whether buffers are as before after a trial forward; since 2.14."""

SET_UP = "_initialize_pp_stages"
"""The method of a schedule that readies its stages, if it must, at the beginning of each call."""
