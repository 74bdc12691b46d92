"""Stages whose backward must stay in one piece, whatever the schedule."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_autopipeline.checks import warn_once
from pp_schedule import schedule_order

logger = logging.getLogger(__name__)

_REASON = "_pp_whole_backward"


def keep_backward_whole(part: nn.Module, reason: str) -> None:
    """Note that a part's backward cannot be split, and why."""
    vars(part)[_REASON] = reason


def keep_backwards_whole(
    stages: Iterable[PipelineStage], parts: Iterable[nn.Module], schedule: Any
) -> None:
    """Have noted parts run their whole backward in its first half, and say so once.

    The numbers are the same; the schedule gains nothing from splitting there.
    """
    order = schedule_order(schedule)
    if not any(action.kind == "I" for row in order.values() for action in row if action):
        return
    for stage, part in zip(stages, parts, strict=True):
        if (reason := vars(part).get(_REASON)) is not None:
            warn_once(logger, f"backwards are not split: {reason}")
            stage.dw_builder = lambda: lambda *args: None
