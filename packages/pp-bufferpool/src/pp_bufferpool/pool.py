"""Slots for the receives of stages, in the place of torch's own buffers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import PipelineStage

from pp_bufferpool import torch_private
from pp_bufferpool.lifetimes import (
    Direction,
    assign_slots,
    check_slack,
    max_overlap,
    recv_lifetimes,
)
from pp_bufferpool.ring import Meter, Ring
from pp_schedule import schedule_order

logger = logging.getLogger(__name__)

_BOUND = (
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "backward_one_chunk",
)


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds on this rank. Sizes are 0 until the first step has set up the stages."""

    active: bool
    """Whether the pool is in effect."""
    buffers: int
    """Tensors that are slots."""
    bytes: int
    """Their size."""
    peak_live: int
    """The most copies of receives that were alive at once: what forwards and backwards held."""
    peak_bytes: int
    """The most bytes that slots and copies took together."""
    buffers_without_pool: int
    """Tensors that this torch would have at once without the pool."""
    bytes_without_pool: int
    """Their size."""
    fallbacks: int
    """Receives for which no slot was free, so that they got memory of their own."""


class RecvBufferPool:
    """The receive slots of this rank's stages; made by `install_recv_buffer_pool`."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._rings: list[Ring] = []
        self._stages: list[PipelineStage] = []

    @property
    def active(self) -> bool:
        """Whether the pool is in effect."""
        return bool(self._stages)

    def stats(self) -> PoolStats:
        """Return counts and sizes as of now; peaks are since installation."""
        slots = [b for ring in self._rings for b in ring.slot_tensors()]
        return PoolStats(
            active=self.active,
            buffers=len(slots),
            bytes=sum(slot.nbytes for slot in slots),
            peak_live=self._meter.peak_live,
            peak_bytes=self._meter.peak_bytes,
            buffers_without_pool=sum(r.unpooled * len(r.sizes) for r in self._rings),
            bytes_without_pool=sum(r.unpooled * sum(r.sizes) for r in self._rings),
            fallbacks=sum(ring.fallbacks for ring in self._rings),
        )

    def uninstall(self) -> None:
        """Give the stages back to torch; to be called between steps, and fine to call twice."""
        for stage in self._stages:
            for name in _BOUND:
                vars(stage).pop(name, None)
            torch_private.restore_buffers(stage)
        for ring in self._rings:
            ring.forget()
        self._stages, self._rings = [], []

    def _add(self, stage: PipelineStage, schedule: torch_private.Schedule, slack: int) -> None:
        order = schedule_order(schedule)
        rank = stage.group_rank
        slot_of = assign_slots(recv_lifetimes(order, rank, copied=True), slack).slot_of
        unpooled = recv_lifetimes(order, rank)

        def ring(direction: Direction, keeps_all: bool) -> Ring:
            lives = [life for life in unpooled if life.direction == direction]
            slots = {m: slot for (_, way, m), slot in slot_of.items() if way == direction}
            at_once = len(lives) if keeps_all else max_overlap(lives)
            return Ring(slots, stage.device, self._meter, at_once)

        # On torch 2.15 the losses that the schedule keeps hold all inputs of the last stage.
        keeps_all = torch_private.PREALLOCATES
        forward = ring("forward", keeps_all or stage.is_last)
        backward = ring("backward", keeps_all)
        _bind(stage, schedule, forward, backward)
        forward.renew(torch_private.forward_infos(stage))
        backward.renew(torch_private.backward_infos(stage))
        self._rings += [forward, backward]
        self._stages.append(stage)


def install_recv_buffer_pool(
    stages: Sequence[PipelineStage], schedule: torch_private.Schedule, slack: int = 2
) -> RecvBufferPool:
    """Receive into few slots that are used again, instead of into a buffer per microbatch.

    Acts on these stage objects alone, between steps, on any number of the pipeline's ranks. With
    another schedule than 1F1B it warns and has no effect.

    Args:
        stages: This rank's stages.
        schedule: The schedule that trains them.
        slack: Slots beyond those that are in use at once, per direction.

    Returns:
        The pool; `stats()` tells what it holds, `uninstall()` ends it.

    Raises:
        ValueError: If `slack` is not an int of at least 0, or a stage has a pool already.
    """
    check_slack(slack)
    taken = [stage.stage_index for stage in stages if vars(stage).keys() & set(_BOUND)]
    if taken:
        raise ValueError(
            f"stages {taken} have a receive pool already, or methods of their own in its place: "
            "call uninstall() on that pool first"
        )
    pool = RecvBufferPool()
    if not torch_private.is_one_f_one_b(schedule):
        logger.warning(
            "the receive buffer pool has no effect with %s: it is for Schedule1F1B alone",
            type(schedule).__name__,
        )
        return pool
    for stage in stages:
        pool._add(stage, schedule, slack)
    return pool


def _bind(
    stage: PipelineStage, schedule: torch_private.Schedule, forward: Ring, backward: Ring
) -> None:
    """Put the rings into a stage's own methods, on this object alone."""
    torch_method = {name: getattr(stage, name) for name in _BOUND}

    def set_up_forward(num_microbatches: int, has_backward: bool) -> None:
        with torch_private.allocating_nothing(stage):
            torch_method["_setup_forward_recv_info"](num_microbatches, has_backward)
        forward.renew(torch_private.forward_infos(stage))

    def set_up_backward(num_microbatches: int) -> None:
        with torch_private.allocating_nothing(stage):
            torch_method["_setup_backward_recv_info"](num_microbatches)
        backward.renew(torch_private.backward_infos(stage))

    def post_forward(microbatch: int) -> list[Any]:
        make_ops = torch_method["get_fwd_recv_ops"]
        if stage.is_first:
            return list(make_ops(microbatch))
        infos = torch_private.forward_infos(stage)[microbatch]
        return forward.post(microbatch, infos, lambda: make_ops(microbatch))

    def post_backward(microbatch: int) -> list[Any]:
        make_ops = torch_method["get_bwd_recv_ops"]
        if stage.is_last or not stage.has_backward:
            return list(make_ops(microbatch))
        infos = torch_private.backward_infos(stage)[microbatch]
        return backward.post(microbatch, infos, lambda: make_ops(microbatch))

    def take_forward(microbatch: int) -> Any:
        infos = torch_private.forward_infos(stage)[microbatch]
        return forward.take(microbatch, infos, torch_method["_retrieve_recv_activations"])

    def take_backward(microbatch: int) -> Any:
        infos = torch_private.backward_infos(stage)[microbatch]
        return backward.take(microbatch, infos, torch_method["_retrieve_recv_grads"])

    def run_backward(microbatch: int, *args: Any, **kwargs: Any) -> None:
        torch_method["backward_one_chunk"](microbatch, *args, **kwargs)
        if stage.is_last:
            torch_private.detach_loss(schedule, microbatch)

    ours = (
        set_up_forward, set_up_backward, post_forward, post_backward, take_forward, take_backward,
        run_backward,
    )  # fmt: skip
    for name, function in zip(_BOUND, ours, strict=True):
        setattr(stage, name, function)
