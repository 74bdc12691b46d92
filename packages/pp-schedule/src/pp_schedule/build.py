"""From stages and a schedule name to a torch schedule that runs."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pp_schedule import torch_private
from pp_schedule.gc_pause import gc_pause
from pp_schedule.names import ScheduleSpec, resolve_schedule
from pp_schedule.orders import (
    Order,
    gpipe_order,
    one_f_one_b_order,
    validate_order,
)
from pp_schedule.placement import stage_ids_this_rank
from pp_schedule.schedule_csv import first_problems, load_csv

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

logger = logging.getLogger(__name__)

LossFunction = Callable[..., torch.Tensor]


def build_pipeline_schedule(
    pipeline_parallel_schedule_csv: str | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: int,
    local_batch_size: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
    scale_grads: bool = False,
) -> torch_private.Schedule:
    """Build the schedule that runs this rank's stages.

    Every rank of the pipeline calls it with its own stages. Nothing is sent.

    Args:
        pipeline_parallel_schedule_csv: A schedule file (one row per rank) in either of torch's
            formats; overrides the name. Communication in it is checked and then made anew for
            the installed torch.
        pipeline_parallel_schedule: A schedule name; see `resolve_schedule`.
        microbatch_size: Rows per microbatch.
        local_batch_size: Rows per step, a multiple of `microbatch_size`.
        stages: This rank's stages.
        loss_fn: Called as `loss_fn(output, target)` for each microbatch on the last stage.
        scale_grads: Divide each microbatch's gradients by the number of microbatches, as a loss
            that is a mean over its microbatch needs. The division is part of each backward pass:
            gradients that an earlier step accumulated are not divided again (torch's own flag
            divides them, 2.13 to 2.15), and the reported losses stay as `loss_fn` gave them.

    Returns:
        A torch schedule; call its `step` on every rank.

    Raises:
        ValueError: Naming everything that is wrong with sizes, names, stages or the file.
    """
    problems = _batch_problems(microbatch_size, local_batch_size)
    if not stages:
        problems.append("stages is empty: every pipeline rank runs at least one stage")
    if not pipeline_parallel_schedule and not pipeline_parallel_schedule_csv:
        problems.append("give pipeline_parallel_schedule or pipeline_parallel_schedule_csv")
    if problems:
        raise ValueError("cannot build the schedule: " + "; ".join(problems))

    num_microbatches = local_batch_size // microbatch_size
    if scale_grads and loss_fn is not None:
        loss_fn = _GradientShare(loss_fn, 1.0 / num_microbatches)
    if pipeline_parallel_schedule_csv:
        with gc_pause():
            return _from_csv(pipeline_parallel_schedule_csv, num_microbatches, stages, loss_fn)
    assert pipeline_parallel_schedule
    spec = resolve_schedule(pipeline_parallel_schedule)
    first = stages[0]
    problems = spec.check(first.group_size, first.num_stages, num_microbatches)
    if not spec.takes(first.group_size, first.num_stages, num_microbatches):
        problems.append(
            f"(microbatches are local_batch_size / microbatch_size = {local_batch_size} / "
            f"{microbatch_size})"
        )
    if not problems:
        problems = _placement_problems(spec, stages)
    if problems:
        raise ValueError(
            f"schedule {pipeline_parallel_schedule!r} cannot run here: " + "; ".join(problems)
        )
    if not spec.single_stage:
        with gc_pause():
            return torch_private.named_schedule(spec.cls, stages, num_microbatches, loss_fn)
    # torch types its schedules' constructors differently; both take these names.
    schedule_class: Callable[..., torch_private.Schedule] = spec.cls
    return schedule_class(
        stages[0], n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False
    )


def schedule_order(schedule: torch_private.Schedule) -> Order:
    """Return the order of actions on every rank of a schedule, for pictures and the simulator."""
    order = torch_private.order_of(schedule)
    if order is not None:
        return order
    stage = torch_private.stages_of(schedule)[0]
    make = gpipe_order if type(schedule).__name__ == "ScheduleGPipe" else one_f_one_b_order
    return make(stage.num_stages, torch_private.num_microbatches_of(schedule))


class _GradientShare:
    """A loss whose value is unchanged and whose gradient is multiplied by `share`."""

    def __init__(self, loss_fn: LossFunction, share: float) -> None:
        self.loss_fn = loss_fn
        self.share = share

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return scale_gradient(self.loss_fn(*args, **kwargs), self.share)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.clone()  # a view could not be detached later

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.share, None


def scale_gradient(value: torch.Tensor, share: float) -> torch.Tensor:
    """Return `value` such that the gradient that reaches its origin is multiplied by `share`."""
    scaled: torch.Tensor = _ScaleGradient.apply(value, share)
    return scaled


def _batch_problems(microbatch_size: int, local_batch_size: int) -> list[str]:
    problems = [
        f"{name}={size} must be at least 1"
        for name, size in (
            ("microbatch_size", microbatch_size),
            ("local_batch_size", local_batch_size),
        )
        if size < 1
    ]
    if not problems and local_batch_size % microbatch_size:
        lower = local_batch_size - local_batch_size % microbatch_size
        near = f"{lower} or " if lower else ""
        problems.append(
            f"local_batch_size={local_batch_size} is not a multiple of microbatch_size="
            f"{microbatch_size}; use a batch of {near}{lower + microbatch_size}"
        )
    return problems


def _placement_problems(spec: ScheduleSpec, stages: Sequence["PipelineStage"]) -> list[str]:
    first = stages[0]
    wanted = stage_ids_this_rank(first.group_rank, first.group_size, first.num_stages, spec.style)
    given = tuple(sorted(stage.stage_index for stage in stages))
    if given == tuple(sorted(wanted)):
        return []
    return [
        f"it places stages in the {spec.style!r} style, so pipeline rank {first.group_rank} of "
        f"{first.group_size} runs stages {wanted}, but the stages given are {given}; see "
        f"stage_ids_this_rank(..., style={spec.style!r})"
    ]


def _from_csv(
    path: str,
    num_microbatches: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
) -> torch_private.Schedule:
    order = load_csv(path)
    first = stages[0]
    problems = []
    if len(order) != first.group_size:
        problems.append(f"it has {len(order)} rows, but there are {first.group_size} ranks")
    mine = {action.stage_index for action in order.get(first.group_rank, ()) if action is not None}
    given = {stage.stage_index for stage in stages}
    if mine != given:
        problems.append(
            f"row {first.group_rank} runs stages {sorted(mine)}, but the stages given on this "
            f"rank are {sorted(given)}"
        )
    actions = [action for row in order.values() for action in row if action is not None]
    microbatches = 1 + max((action.microbatch for action in actions), default=-1)
    if microbatches != num_microbatches:
        problems.append(
            f"it has {microbatches} microbatches, but local_batch_size / microbatch_size is "
            f"{num_microbatches}"
        )
    problems += validate_order(order, first.num_stages, num_microbatches)
    if problems:
        raise ValueError(f"the schedule in {path} cannot run: {first_problems(problems)}")
    return torch_private.runtime_schedule(stages, num_microbatches, loss_fn, order)
