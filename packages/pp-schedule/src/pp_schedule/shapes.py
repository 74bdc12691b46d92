"""Shapes and cuts of a schedule, set from outside so that torch need not find them out.

torch infers the shapes that cross stage boundaries by running a real forward per stage at the
first step, again at each switch between training and evaluation, and never again when the batch
changes its shape (2.13 to 2.15). Who knows the shapes sets them here and none of that happens.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pp_schedule import torch_private

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def set_stage_shapes(
    stage: "PipelineStage", inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Describe what one microbatch brings into a stage and what leaves it.

    Args:
        stage: A stage of this rank.
        inputs: Tensors of the right shape, dtype and `requires_grad`; meta tensors will do.
        outputs: The same for what the stage returns.
    """
    torch_private.set_stage_metadata(stage, inputs, outputs)


def use_stage_shapes(schedule: torch_private.Schedule) -> None:
    """Make a schedule take up its stages' shapes at its next call.

    To be called on every rank after `set_stage_shapes`, for the schedule that used the stages last.
    Others that share them see the new shapes when it is their turn.
    """
    torch_private.forget_metadata(schedule)


def set_keyword_split(schedule: torch_private.Schedule, dims: Mapping[str, int | None]) -> None:
    """Say along which dim each keyword argument of the next call is cut into microbatches.

    Args:
        schedule: A schedule of this rank.
        dims: For each keyword argument that will be passed its batch dim, or None to give it whole
            to every microbatch.
    """
    torch_private.set_keyword_chunks(schedule, dims)
