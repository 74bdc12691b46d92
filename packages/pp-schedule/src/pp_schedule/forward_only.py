"""Evaluation through any placement: a schedule of forwards."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pp_schedule import torch_private
from pp_schedule.microbatch_loss import LossFunction
from pp_schedule.orders import breadth_first_order
from pp_schedule.set_up import keep_own_set_up

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def build_forward_only_schedule(
    stages: Sequence["PipelineStage"],
    stage_ids: Mapping[int, Sequence[int]],
    num_microbatches: int,
    loss_fn: LossFunction | None,
) -> torch_private.Schedule:
    """Build a schedule that runs forwards alone, whatever the placement of the stages.

    torch's training schedules evaluate by leaving their backwards out, which fails for ZBV and
    DualPipeV (2.13 to 2.15); this one works for every placement. Its `step` is the evaluation;
    call it under `torch.no_grad()`. Every rank of the pipeline builds it.

    Args:
        stages: This rank's stages, shared with the training schedule.
        stage_ids: The stage indices of every pipeline rank.
        num_microbatches: Microbatches per call.
        loss_fn: Called as `loss_fn(output, target)` on the last stage.
    """
    order = breadth_first_order(stage_ids, num_microbatches)
    schedule = torch_private.runtime_schedule(stages, num_microbatches, loss_fn, order)
    torch_private.keep_forwards_only(schedule)
    keep_own_set_up(schedule)
    return schedule
