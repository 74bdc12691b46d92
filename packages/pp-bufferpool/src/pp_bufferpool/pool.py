"""Slots for the receives of stages, in the place of torch's own buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage

from pp_bufferpool import torch_private
from pp_bufferpool.lifetimes import (
    Lifetime,
    Runtime,
    assign_slots,
    check_slack,
    max_overlap,
    recv_lifetimes,
    step_lifetimes,
)
from pp_bufferpool.shelf import Shelf
from pp_bufferpool.stage_methods import StageMethods, has_pool
from pp_schedule import schedule_order
from pp_schedule.microbatch_loss import MicrobatchLoss


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds on this rank. Sizes are 0 until the first step has set up the stages."""

    active: bool
    """Whether the pool is in effect."""
    buffers: int
    """Slots that have memory, each for one receive at a time."""
    bytes: int
    """Their size."""
    peak_live: int
    """The most receives that existed at once since installation."""
    allocations: int
    """How often memory was allocated since installation."""
    allocated_bytes: int
    """How much that was together."""
    fallbacks: int
    """Receives for which no slot was free, so that they got new memory."""
    buffers_without_pool: int
    """Receives that this torch would hold at once without the pool."""
    bytes_without_pool: int
    """Their size."""


class RecvBufferCounts(NamedTuple):
    """Receives that a rank has memory for at once, all of equal size."""

    with_pool: int
    """Slots of a pool."""
    without_pool: int
    """Buffers of the installed torch."""


class RecvBufferPool:
    """The receive slots of this rank's stages; made by `install_recv_buffer_pool`.

    Attributes:
        poison: Whether slots are filled with NaN as soon as nobody holds them, to find readers
            that come too late. For debugging: it costs time.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], schedule: torch_private.Schedule, slack: int
    ) -> None:
        lifetimes = _lifetimes(schedule, stages[0].group_rank)
        self._unpooled = _unpooled(lifetimes, stages[0].num_stages, schedule)
        self._shelf = Shelf(lifetimes, slack, torch.device(stages[0].device))
        self._methods = [StageMethods(stage, self._shelf, schedule) for stage in stages]

    @property
    def active(self) -> bool:
        """Whether the pool is in effect."""
        return bool(self._methods)

    @property
    def poison(self) -> bool:
        """Whether slots are filled with NaN as soon as nobody holds them."""
        return self._shelf.poison

    @poison.setter
    def poison(self, on: bool) -> None:
        self._shelf.poison = on

    def stats(self) -> PoolStats:
        """Return counts and sizes as of now."""
        meter = self._shelf.meter
        sizes = {owner: layout.nbytes for owner, layout in self._shelf.layouts.items()}
        unpooled = [e for e in self._unpooled if (e.stage_index, e.direction) in sizes]
        return PoolStats(
            active=self.active,
            buffers=sum(slot.nbytes > 0 for slot in self._shelf.slots),
            bytes=sum(slot.nbytes for slot in self._shelf.slots),
            peak_live=meter.peak_live,
            allocations=meter.allocations,
            allocated_bytes=meter.allocated_bytes,
            fallbacks=meter.fallbacks,
            buffers_without_pool=max_overlap(unpooled),
            bytes_without_pool=max_overlap(unpooled, sizes),
        )

    def uninstall(self) -> None:
        """Give the stages back to torch; to be called between steps, and fine to call twice.

        Raises:
            RuntimeError: If somebody else has wrapped the stages' methods since.
        """
        wrapped = [name for methods in self._methods for name in methods.wrapped_since()]
        if wrapped:
            raise RuntimeError(
                f"the receive buffer pool cannot be uninstalled: {', '.join(wrapped)} of its "
                "stages were replaced after it was installed; undo that first"
            )
        for methods in self._methods:
            methods.remove()
        self._methods = []
        self._shelf.clear()


def install_recv_buffer_pool(
    stages: Sequence[PipelineStage], schedule: torch_private.Schedule, slack: int = 2
) -> RecvBufferPool:
    """Receive into few slots that are used again, instead of into a buffer per microbatch.

    Acts on these stage objects alone, between steps, on any number of the pipeline's ranks. Nothing
    is sent.

    Args:
        stages: This rank's stages.
        schedule: The schedule that trains them, any of torch's. Others may run the same stages too.
        slack: Slots beyond those that are in use at once.

    Returns:
        The pool; `stats()` tells what it holds, `uninstall()` ends it.

    Raises:
        ValueError: If `slack` is not an int of at least 0, `stages` are not those of the schedule,
            or a stage has a pool already.
        RuntimeError: If receives are under way, or the installed torch keeps its buffers in a way
            that is not known here.
    """
    check_slack(slack)
    if not stages:
        raise ValueError("stages is empty: every pipeline rank runs at least one stage")
    taken = [stage.stage_index for stage in stages if has_pool(stage)]
    if taken:
        raise ValueError(
            f"stages {taken} have a receive pool already: call uninstall() on that pool first"
        )
    of_schedule = torch_private.stages_of(schedule)
    if sorted(map(id, stages)) != sorted(map(id, of_schedule)):
        given = [stage.stage_index for stage in stages]
        raise ValueError(
            f"the stages given, of indices {given}, are not the objects that this schedule runs, of "
            f"indices {[stage.stage_index for stage in of_schedule]}: give each of those once"
        )
    missing = sorted({n for s in stages for n in torch_private.missing_names(s, schedule)})
    if missing:
        raise RuntimeError(
            f"torch {version('torch')} has no {', '.join(missing)}, without which receives cannot "
            "be pooled; the pool was read against torch 2.13 to 2.15. Leave it out: it changes "
            "memory, never a result"
        )
    busy = [s.stage_index for s in stages if not StageMethods.is_between_steps(s)]
    if busy:
        raise RuntimeError(
            f"stages {busy} have receives under way, or had when a step failed: install a pool "
            "between steps, and after a failed step make stages and schedule anew"
        )
    return RecvBufferPool(stages, schedule, slack)


def recv_buffer_counts(
    schedule: torch_private.Schedule, slack: int = 2
) -> dict[int, RecvBufferCounts]:
    """Return for every pipeline rank what a pool holds and what the installed torch does.

    Arithmetic on the schedule's order; any rank can ask.
    """
    check_slack(slack)
    order = schedule_order(schedule)
    num_stages = 1 + max(a.stage_index for row in order.values() for a in row if a is not None)
    counts = {}
    for rank in order:
        lifetimes = _lifetimes(schedule, rank)
        unpooled = max_overlap(_unpooled(lifetimes, num_stages, schedule))
        counts[rank] = RecvBufferCounts(len(assign_slots(lifetimes, slack).sizes), unpooled)
    return counts


def _lifetimes(schedule: torch_private.Schedule, rank: int) -> list[Lifetime]:
    programs = torch_private.programs(schedule)
    if programs is not None:
        return step_lifetimes(programs[rank])
    runtime: Runtime = "gpipe" if torch_private.is_gpipe(schedule) else "1f1b"
    return recv_lifetimes(schedule_order(schedule), rank, runtime)


def _unpooled(
    lifetimes: Sequence[Lifetime], num_stages: int, schedule: torch_private.Schedule
) -> list[Lifetime]:
    """Return how long the installed torch keeps the buffers of these receives."""
    end = max((life.last for life in lifetimes), default=0)
    # Losses that a schedule keeps have graphs that end in the last stage's inputs. Those of
    # schedules that pp_schedule built are let go of.
    keeps_losses = not isinstance(torch_private.loss_fn_of(schedule), MicrobatchLoss)

    def kept(life: Lifetime) -> Lifetime:
        if torch_private.PREALLOCATES:
            return life._replace(first=0, last=end)
        is_last_input = life.direction == "forward" and life.stage_index == num_stages - 1
        return life._replace(last=end) if keeps_losses and is_last_input else life

    return [kept(life) for life in lifetimes]
