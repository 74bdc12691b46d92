"""From stages and a schedule name to a torch schedule that runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from pp_schedule import torch_private
from pp_schedule.gc_pause import gc_pause
from pp_schedule.microbatch_loss import LossFunction, MicrobatchLoss
from pp_schedule.named_orders import named_order
from pp_schedule.names import ScheduleSpec, resolve_schedule
from pp_schedule.orders import (
    Order,
    gpipe_order,
    one_f_one_b_order,
    validate_order,
)
from pp_schedule.placement import stage_ids_this_rank
from pp_schedule.schedule_csv import first_problems, load_csv
from pp_schedule.set_up import keep_own_set_up
from pp_schedule.split_backward import make_split_backward_exact

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


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
    problems = []
    if not pipeline_parallel_schedule and not pipeline_parallel_schedule_csv:
        problems.append("give pipeline_parallel_schedule or pipeline_parallel_schedule_csv")
    sizes = (microbatch_size, local_batch_size)
    _refuse_sizes(*sizes, stages, problems)
    if pipeline_parallel_schedule_csv:
        path = pipeline_parallel_schedule_csv
        with gc_pause():
            order = load_csv(path)
        make = partial(_from_order, order, f"the schedule in {path}")
    else:
        assert pipeline_parallel_schedule
        make = partial(_from_name, pipeline_parallel_schedule, *sizes)
    return _make(make, *sizes, stages, loss_fn, scale_grads)


def build_order_schedule(
    order: Order,
    microbatch_size: int,
    local_batch_size: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
    scale_grads: bool = False,
) -> torch_private.Schedule:
    """Build a schedule that runs a given order, as `build_pipeline_schedule` does from a file.

    Args:
        order: The actions of every rank, the same on every rank.
        microbatch_size: Rows per microbatch.
        local_batch_size: Rows per step, a multiple of `microbatch_size`.
        stages: This rank's stages.
        loss_fn: See `build_pipeline_schedule`.
        scale_grads: See `build_pipeline_schedule`.

    Raises:
        ValueError: Naming everything that is wrong with sizes, stages or the order.
    """
    _refuse_sizes(microbatch_size, local_batch_size, stages, [])
    make = partial(_from_order, order, "the order")
    return _make(make, microbatch_size, local_batch_size, stages, loss_fn, scale_grads)


def schedule_order(schedule: torch_private.Schedule) -> Order:
    """Return the order of actions on every rank of a schedule, for pictures and the simulator."""
    order = torch_private.order_of(schedule)
    if order is not None:
        return order
    stage = torch_private.stages_of(schedule)[0]
    make = gpipe_order if type(schedule).__name__ == "ScheduleGPipe" else one_f_one_b_order
    return make(stage.num_stages, torch_private.num_microbatches_of(schedule))


def _make(
    make: Callable[..., torch_private.Schedule],
    microbatch_size: int,
    local_batch_size: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
    scale_grads: bool,
) -> torch_private.Schedule:
    num_microbatches = local_batch_size // microbatch_size
    if loss_fn is not None:
        loss_fn = MicrobatchLoss(loss_fn, 1.0 / num_microbatches if scale_grads else 1.0)
    with gc_pause():
        schedule = make(num_microbatches, stages, loss_fn)
    keep_own_set_up(schedule)
    return schedule


def _refuse_sizes(
    microbatch_size: int,
    local_batch_size: int,
    stages: Sequence["PipelineStage"],
    problems: list[str],
) -> None:
    problems = _batch_problems(microbatch_size, local_batch_size) + problems
    if not stages:
        problems.append("stages is empty: every pipeline rank runs at least one stage")
    if problems:
        raise ValueError("cannot build the schedule: " + "; ".join(problems))


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


def _from_name(
    name: str,
    microbatch_size: int,
    local_batch_size: int,
    num_microbatches: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
) -> torch_private.Schedule:
    spec = resolve_schedule(name)
    first = stages[0]
    problems = spec.check(first.group_size, first.num_stages, num_microbatches)
    if not spec.takes(first.group_size, first.num_stages, num_microbatches):
        batch = "local_batch_size", local_batch_size
        microbatch = "microbatch_size", microbatch_size
        problems.append(spec.fitting_sizes(first.group_size, first.num_stages, batch, microbatch))
    if not problems:
        problems = _placement_problems(spec, stages)
    if spec.name != "1f1b":
        problems += _wrapper_problems(stages)
    if problems:
        raise ValueError(f"schedule {name!r} cannot run here: " + "; ".join(problems))
    if spec.splits_backward:
        for stage in stages:
            make_split_backward_exact(stage)
    if spec.name == "auto":
        order = named_order(spec, first.group_size, first.num_stages, num_microbatches)
        return torch_private.runtime_schedule(stages, num_microbatches, loss_fn, order)
    if not spec.single_stage:
        return torch_private.named_schedule(spec.cls, stages, num_microbatches, loss_fn)
    # torch types its schedules' constructors differently; both take these names.
    schedule_class: Callable[..., torch_private.Schedule] = spec.cls
    return schedule_class(
        stages[0], n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False
    )


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


def _wrapper_problems(stages: Sequence["PipelineStage"]) -> list[str]:
    # torch (2.13 to 2.15) prepares the wrapper for one forward before each backward.
    return [
        f"stage {stage.stage_index} is wrapped in DistributedDataParallel, which takes the schedule "
        "'1f1b' alone: use that, or fully_shard the stage instead"
        for stage in stages
        if isinstance(stage.submod, DistributedDataParallel)
    ]


def _from_order(
    order: Order,
    what: str,
    num_microbatches: int,
    stages: Sequence["PipelineStage"],
    loss_fn: LossFunction | None,
) -> torch_private.Schedule:
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
    problems += _wrapper_problems(stages)
    if problems:
        raise ValueError(f"{what} cannot run: {first_problems(problems)}")
    if any(action.kind == "I" for action in actions):
        for stage in stages:
            make_split_backward_exact(stage)
    return torch_private.runtime_schedule(stages, num_microbatches, loss_fn, order)
