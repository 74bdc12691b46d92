"""Stages that sleep: as many ranks as one likes, as if each had a device of its own.

Only the sleeps are made up. Schedules, messages and autograd are torch's own.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pipelines import Pipeline, run
from torch import nn

from pp_schedule import Order, StageCosts


def measure(
    schedule: str | Order, times: StageCosts, pp_size: int, num_microbatches: int, steps: int = 3
) -> float:
    """Return the median seconds of a step whose stages sleep for the given times.

    Args:
        schedule: A schedule's name, or an order.
        times: Seconds per stage; the times of one kind at least are one number per stage.
        pp_size: Number of ranks.
        num_microbatches: Microbatches per step.
        steps: How many steps are measured.
    """
    (found,) = run([sleeping_pipeline(schedule, times, pp_size, num_microbatches)], steps)
    return found.seconds


def sleeping_pipeline(
    schedule: str | Order, times: StageCosts, pp_size: int, num_microbatches: int
) -> Pipeline:
    """Return what `measure` runs."""
    kinds = (times.forward, times.backward_input, times.backward_weight)
    num_stages = max(len(kind) for kind in kinds if isinstance(kind, Sequence))
    make_stage = partial(_make_stage, times, num_stages)
    return Pipeline(schedule, make_stage, num_stages, pp_size, num_microbatches, torch.zeros(1, 1))


def _make_stage(times: StageCosts, num_stages: int, index: int) -> nn.Module:
    kinds = ("forward", "backward_input", "backward_weight")
    return SleepingStage(*(times.per_stage(kind, num_stages)[index] for kind in kinds))


class SleepingStage(nn.Module):
    """A stage whose forward and halves of a backward sleep.

    Input and weight meet in one sum, which is where torch cuts a backward into its halves: the
    input half runs what lies between the sum and the input, the weight half what lies between the
    sum and the weight.
    """

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        super().__init__()
        self.times = forward, backward_input, backward_weight
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and prepare what will sleep."""
        on_forward, on_input, on_weight = self.times
        if not x.requires_grad:  # the first stage: nothing runs on the way to its input
            on_input, on_weight = 0.0, on_input + on_weight
        time.sleep(on_forward)
        total: torch.Tensor = _sleep_backward(x, on_input) + _sleep_backward(self.weight, on_weight)
        return total


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def _sleep_backward(x: torch.Tensor, seconds: float) -> torch.Tensor:
    result: torch.Tensor = _SleepBackward.apply(x, seconds)
    return result
