"""The real timeline of a schedule's steps, on every rank, with clocks aligned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from pp_schedule import torch_private
from pp_schedule.clocks import align_clocks, make_stopwatch
from pp_schedule.measured import Measurement, measured_timeline, split_steps
from pp_schedule.orders import Action
from pp_schedule.timeline import Timeline

_KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


@contextmanager
def record(schedule: torch_private.Schedule) -> Iterator["Recording"]:
    """Record when the schedule's actions run, within a `with` block.

    Every rank of the pipeline records, and afterwards asks for the timeline:

        with record(schedule) as recording:
            schedule.step(...)
        timeline = recording.timeline()

    Only the objects of this schedule are touched, and at the block's end they are as they were.
    Numbers stay the same. The loss counts as part of the last stage's forward; waiting for
    messages is part of no action.

    Args:
        schedule: Any schedule of torch's, with stages on the CPU or an accelerator.
    """
    recording = Recording(torch_private.stages_of(schedule))
    undo = [
        _rebind(stage, name, partial(recording._timed, stage, kind))
        for stage in recording.stages
        for name, kind in _KINDS.items()
    ]
    undo.append(_rebind(schedule, torch_private.COMPUTE_LOSS, recording._with_loss))
    try:
        yield recording
    finally:
        for restore in reversed(undo):
            restore()
        recording._close()


class Recording:
    """What `record` yields; complete when its block has ended."""

    def __init__(self, stages: list[PipelineStage]) -> None:
        self.stages = stages
        """This rank's stages."""
        self.clock_error = 0.0
        """The most by which two ranks' times may disagree, in seconds; 0 until a timeline is made.

        Clocks of several machines drift besides: see `pp_schedule.clocks.align_clocks`.
        """
        self._stopwatch = make_stopwatch(stages[0].device)
        self._marks: list[tuple[Action, Any, Any]] = []
        self._measured: list[Measurement] | None = None
        self._steps: list[list[list[Measurement]]] | None = None

    def timeline(self, step: int = -1) -> Timeline:
        """Return a step of all ranks as a timeline in seconds, which starts at 0.

        The first call gathers from all ranks of the pipeline, so each of them makes it; later
        ones send nothing.

        Args:
            step: Which step of those in the block; the last one by default.

        Raises:
            RuntimeError: Within the block.
            ValueError: If the ranks recorded different numbers of steps, or none.
            IndexError: If there is no such step.
        """
        if self._measured is None:
            raise RuntimeError("the recording is not complete: leave its `with` block first")
        if self._steps is None:
            self._steps = self._gather(self._measured)
        if not -len(self._steps) <= step < len(self._steps):
            raise IndexError(f"there is no step {step}: {len(self._steps)} were recorded")
        return measured_timeline(self._steps[step])

    def _gather(self, measured: list[Measurement]) -> list[list[list[Measurement]]]:
        """Return the steps of all ranks, each with a row per rank, on the clock of rank 0."""
        group = self.stages[0].group
        offset = align_clocks(group, self.stages[0].device)
        mine = [(a, s + offset.seconds, e + offset.seconds) for a, s, e in measured]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        error = offset.error + self._stopwatch.error
        dist.all_gather_object(everyone, (split_steps(mine), error), group=group)
        counts = [len(steps) for steps, _ in everyone]
        if len(set(counts)) != 1 or counts[0] == 0:
            raise ValueError(
                "every rank of the pipeline must record the same number of steps, at least one, "
                f"but from rank 0 on they recorded {counts}"
            )
        self.clock_error = sum(sorted(error for _, error in everyone)[-2:])
        return [list(rows) for rows in zip(*(steps for steps, _ in everyone), strict=True)]

    def _timed(self, stage: PipelineStage, kind: str, method: Callable[..., Any]) -> Any:
        mark, marks, stage_index = self._stopwatch.mark, self._marks, int(stage.stage_index)

        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if kind != "F" and not stage.has_backward:  # an evaluation: torch does nothing then
                return method(microbatch, *args, **kwargs)
            start = mark()
            result = method(microbatch, *args, **kwargs)
            actual = kind if kwargs.get("full_backward", True) else "I"
            marks.append((Action(stage_index, actual, microbatch), start, mark()))
            return result

        return run

    def _with_loss(self, method: Callable[..., Any]) -> Any:
        mark, marks = self._stopwatch.mark, self._marks

        def run(stage: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(stage, *args, **kwargs)
            if stage.is_last:
                action, start, _ = marks[-1]
                marks[-1] = action, start, mark()
            return result

        return run

    def _close(self) -> None:
        seconds = self._stopwatch.stop()
        self._measured = [(a, seconds(start), seconds(end)) for a, start, end in self._marks]
        self._marks.clear()


def _rebind(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Any]
) -> Callable[[], None]:
    """Give one object a wrapped method; return what takes it back."""
    before = vars(owner).get(name)
    wrapped = wrap(getattr(owner, name))
    setattr(owner, name, wrapped)

    def restore() -> None:
        if vars(owner).get(name) is not wrapped:
            return  # somebody else has replaced it since: theirs stays
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore
