"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0.

A stage describes each receive by an *info* object: where it comes from, its tensor's metadata and
its buffer. torch 2.13 gives every info its buffer when the stage is set up and keeps it; torch 2.15
has the info allocate its buffer when the receive is posted and gives it away when it is read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _PipelineSchedule

Schedule = _PipelineSchedule
Infos = Sequence[Any]
Buffers = tuple[torch.Tensor | None, ...]

PREALLOCATES = not hasattr(vars(torch_stage)["_RecvInfo"], "allocate_buffer")
"""Whether this torch allocates one buffer per microbatch and direction (2.13)."""


def is_one_f_one_b(schedule: Schedule) -> bool:
    """Tell whether this is torch's 1F1B schedule."""
    return isinstance(schedule, Schedule1F1B)


def forward_infos(stage: PipelineStage) -> Mapping[int, Infos]:
    """Return the infos of the activations that a stage receives, by microbatch."""
    received: Mapping[int, Infos] = {} if stage.is_first else stage.args_recv_info
    return received


def backward_infos(stage: PipelineStage) -> Mapping[int, Infos]:
    """Return the infos of the gradients that a stage receives, by microbatch."""
    return stage.grad_recv_info


def layouts(infos: Infos) -> tuple[tuple[Any, ...] | None, ...]:
    """Return shape, stride and dtype of each receive; None where nothing is received."""
    metas = [info.tensor_meta for info in infos]
    return tuple(meta and (meta.shape, meta.stride, meta.dtype) for meta in metas)


def new_buffers(infos: Infos, device: torch.device) -> Buffers:
    """Allocate buffers as torch would for these receives."""
    # A slot made during an evaluation must also serve training, so it is a normal tensor always.
    with torch.inference_mode(False):
        return tuple(
            None if info.tensor_meta is None else _make_tensor_from_meta(info.tensor_meta, device)
            for info in infos
        )


def receive_into(infos: Infos, buffers: Buffers, make_ops: Callable[[], list[Any]]) -> list[Any]:
    """Have `make_ops` make receive operations that write into `buffers`."""
    if PREALLOCATES:
        for info, buffer in zip(infos, buffers, strict=True):
            info.buffer = buffer
        return make_ops()
    for info, buffer in zip(infos, buffers, strict=True):
        if buffer is not None:
            info.allocate_buffer = partial(_own, info, buffer)
    try:
        return make_ops()
    finally:
        for info in infos:
            vars(info).pop("allocate_buffer", None)


def _own(info: Any, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    info.set_buffer(buffer)  # refuses if an earlier receive has not been read
    return buffer


def copy_buffers(infos: Infos, device: torch.device) -> list[torch.Tensor]:
    """Put copies of the same layout in the place of the infos' buffers; return the copies."""
    copies = []
    for info in infos:
        if info.buffer is not None:
            copy = _make_tensor_from_meta(info.tensor_meta, device)
            info.buffer = copy.copy_(info.buffer)
            copies.append(copy)
    return copies


def drop_buffers(infos: Infos) -> None:
    """Let go of the infos' buffers."""
    for info in infos:
        info.buffer = None


def restore_buffers(stage: PipelineStage) -> None:
    """Give a stage that has been set up the buffers that this torch expects it to have."""
    if PREALLOCATES:
        for by_microbatch in (forward_infos(stage), backward_infos(stage)):
            for infos in by_microbatch.values():
                for info, buffer in zip(infos, new_buffers(infos, stage.device), strict=True):
                    info.buffer = buffer


@contextmanager
def allocating_nothing(stage: PipelineStage) -> Iterator[None]:
    """Let a stage set up its receives with buffers that take no memory."""
    device = stage.device
    stage.device = torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def detach_loss(schedule: Schedule, microbatch: int) -> None:
    """Replace a loss that the schedule keeps until the end of its step by its value.

    After its backward a loss's graph serves nobody, but its leaves, the stage's inputs, live on.
    """
    if microbatch < len(schedule._internal_losses):
        schedule._internal_losses[microbatch] = schedule._internal_losses[microbatch].detach()
