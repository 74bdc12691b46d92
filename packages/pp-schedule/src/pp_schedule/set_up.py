"""The set-up of stages that several schedules share: each uses its own, and nothing is lost by it.

torch readies stages (what is received, and which of it needs gradients) at the first call of a
schedule and never asks whether another schedule has done so since: a training step after the first
evaluation by another schedule gives wrong gradients, without an error (2.13 to 2.15). And whenever
it readies stages it drops the gradients that FSDP modules have accumulated.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from pp_schedule import torch_private

_SET_UP_BY = "_pp_set_up_by"


def keep_own_set_up(schedule: torch_private.Schedule) -> None:
    """Have a schedule ready its stages again when another one has used them in between.

    What it found out about them by a trial forward, as torch does where nothing was said, it does
    not find out again. Gradients are left as they are. It concerns this object alone.
    """
    ready = getattr(schedule, torch_private.SET_UP)
    me = object()
    known: dict[tuple[bool, int], Any] = {}

    def run(
        stages: Sequence[PipelineStage],
        args: Any,
        kwargs: Any,
        target: Any,
        forward: bool,
        backward: bool,
        **others: Any,
    ) -> tuple[bool, bool]:
        wanted = torch_private.has_backward(schedule)
        mine = all(vars(stage).get(_SET_UP_BY) is me for stage in stages)
        if forward and mine and backward == wanted:
            return forward, backward
        if not forward:
            known.clear()  # the first call; or somebody has set other shapes
        found = {
            stage: known[key]
            for stage in stages
            if (key := (wanted, int(stage.stage_index))) in known
            and not torch_private.is_described(stage, wanted)
        }
        with _as_it_was(stages), _described(found):
            done: tuple[bool, bool] = ready(stages, args, kwargs, target, False, False, **others)
        for stage in stages:
            known[wanted, int(stage.stage_index)] = torch_private.set_up_description(stage)
            vars(stage)[_SET_UP_BY] = me
        return done

    vars(schedule)[torch_private.SET_UP] = run


@contextmanager
def _as_it_was(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """Give gradients back at the end, and buffers, which a trial forward may have changed."""
    gradients = [(p, p.grad) for stage in stages for p in stage.submod.parameters()]
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    if not torch_private.RESTORES_BUFFERS:
        buffers = [(b, b.clone()) for stage in stages for b in stage.submod.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _described(descriptions: Mapping[PipelineStage, Any]) -> Iterator[None]:
    """Have stages be set up as they were described."""
    given = {
        stage: torch_private.swap_description(stage, description)
        for stage, description in descriptions.items()
    }
    try:
        yield
    finally:
        for stage, before in given.items():
            torch_private.swap_description(stage, before)
