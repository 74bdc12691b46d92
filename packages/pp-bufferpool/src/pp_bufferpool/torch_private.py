"""Every torch-private name that this package uses, read against torch 2.13.0, 2.14.1 and 2.15.0.

A stage describes each receive by an *info* object: where it comes from, its tensor's metadata and
its buffer. torch 2.13 and 2.14 give every info its buffer when the stage is set up and keep it;
torch 2.15 has the info allocate its buffer when the receive is posted and gives it away when it is
read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _PipelineSchedule, _PipelineScheduleRuntime

Schedule = _PipelineSchedule
Infos = Sequence[Any]
Tensors = Sequence[torch.Tensor | None]

PREALLOCATES = not hasattr(vars(torch_stage).get("_RecvInfo"), "allocate_buffer")
"""Whether this torch allocates one buffer per microbatch and direction (2.13 and 2.14)."""

STAGE_METHODS = (
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "set_local_bwd_input",
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
)
"""Methods of a stage that a pool puts its own in the place of."""


def stages_of(schedule: Schedule) -> list[Any]:
    """Return a schedule's local stages."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)  # type: ignore[attr-defined]


def missing_names(stage: PipelineStage, schedule: Schedule) -> list[str]:
    """Return what a pool needs and the installed torch does not have, or no longer."""
    kept = "fwd_cache" if PREALLOCATES else "_forward_chunk_states"
    names = [*STAGE_METHODS, "args_recv_info", "grad_recv_info", kept]
    missing = [f"PipelineStage.{name}" for name in names if not hasattr(stage, name)]
    info = vars(torch_stage).get("_RecvInfo")
    for name in () if PREALLOCATES else ("set_buffer", "take_buffer"):
        if not hasattr(info, name):
            missing.append(f"_RecvInfo.{name}")
    for name in ("_internal_losses", "_loss_fn"):
        if not hasattr(schedule, name):
            missing.append(f"{type(schedule).__name__}.{name}")
    if isinstance(schedule, _PipelineScheduleRuntime) and not programs(schedule):
        missing.append(f"{type(schedule).__name__}.pipeline_order_with_comms")
    return missing


def programs(schedule: Schedule) -> Mapping[int, Sequence[Any]] | None:
    """Return every rank's steps of a schedule with explicit receives; None if it has none."""
    if isinstance(schedule, _PipelineScheduleRuntime):
        return schedule.pipeline_order_with_comms
    return None


def is_gpipe(schedule: Schedule) -> bool:
    """Tell whether this is torch's GPipe schedule."""
    return isinstance(schedule, ScheduleGPipe)


def loss_fn_of(schedule: Schedule) -> Any:
    """Return the loss function of a schedule, or None."""
    return schedule._loss_fn


def forward_infos(stage: PipelineStage) -> Mapping[int, Infos]:
    """Return the infos of the activations that a stage receives, by microbatch."""
    received: Mapping[int, Infos] = {} if stage.is_first else stage.args_recv_info
    return received


def backward_infos(stage: PipelineStage) -> Mapping[int, Infos]:
    """Return the infos of the gradients that a stage receives, by microbatch."""
    return stage.grad_recv_info


def tensors_like(infos: Infos, device: torch.device) -> Tensors:
    """Return new tensors as torch would allocate for these receives."""
    return [
        None if info.tensor_meta is None else _make_tensor_from_meta(info.tensor_meta, device)
        for info in infos
    ]


def receive_into(infos: Infos, tensors: Tensors, make_ops: Callable[[], list[Any]]) -> list[Any]:
    """Have `make_ops` make receive operations that write into `tensors`."""
    if PREALLOCATES:
        for info, tensor in zip(infos, tensors, strict=True):
            info.buffer = tensor
        return make_ops()
    for info, tensor in zip(infos, tensors, strict=True):
        if tensor is not None:
            info.allocate_buffer = partial(_own, info, tensor)
    try:
        return make_ops()
    finally:
        for info in infos:
            vars(info).pop("allocate_buffer", None)


def _own(info: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    info.set_buffer(tensor)  # refuses if an earlier receive has not been read
    return tensor


def have_buffers(infos: Infos) -> bool:
    """Tell whether a receive into these infos is under way, or was when a step failed."""
    return any(info.buffer is not None and not info.is_root_arg for info in infos)


def drop_buffers(infos: Infos) -> None:
    """Let go of the infos' buffers."""
    for info in infos:
        info.buffer = None


def restore_buffers(stage: PipelineStage) -> None:
    """Give a stage that has been set up the buffers that this torch expects it to have."""
    if PREALLOCATES:
        for by_microbatch in (forward_infos(stage), backward_infos(stage)):
            for infos in by_microbatch.values():
                for info, tensor in zip(infos, tensors_like(infos, stage.device), strict=True):
                    info.buffer = tensor


def zeros_for_none(
    infos: Infos, gradients: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients with zeros where a stage of this rank gave none, as torch 2.15 has it.

    Up to 2.14 torch overwrites the buffer from the set-up with zeros.
    """
    zeros = tensors_like(infos, torch.device("meta"))
    return tuple(
        torch.zeros_like(zero, device=device) if gradient is None and zero is not None else gradient
        for gradient, zero in zip(gradients, zeros, strict=True)
    )


@contextmanager
def allocating_nothing(stage: PipelineStage) -> Iterator[None]:
    """Let a stage set up its receives with buffers that take no memory."""
    device = stage.device
    stage.device = torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def forget_inputs(stage: PipelineStage, microbatch: int) -> None:
    """Let go of the inputs of a forward that no backward will follow."""
    if PREALLOCATES:
        _, inputs = vars(stage)["fwd_cache"][microbatch]
    else:
        inputs = stage._forward_chunk_states[microbatch].input_values
    inputs.clear()


def use_count(storage: torch.UntypedStorage) -> int:
    """Return how many hold a storage in torch itself: tensors, graphs, pending operations."""
    return torch._C._storage_Use_Count(storage._cdata)


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return memory, uninitialised."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def replace_loss(schedule: Schedule, microbatch: int, loss: torch.Tensor) -> None:
    """Replace a loss that a schedule keeps until the end of its step."""
    if microbatch < len(schedule._internal_losses):
        schedule._internal_losses[microbatch] = loss
