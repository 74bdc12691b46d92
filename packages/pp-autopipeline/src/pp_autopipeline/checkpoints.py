"""Checkpoints to resume training from, on any cut of the model over any number of ranks."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from pp_autopipeline.autopipeline import AutoPipeline
from pp_autopipeline.checkpoint_folder import CheckpointFolder
from pp_autopipeline.checks import refuse
from pp_autopipeline.disk_writer import DiskWriter
from pp_autopipeline.ranks import Ranks
from pp_autopipeline.training_state import SavedTensors, TrainingState, claim_problems, claims_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """Where training goes on."""

    step: int
    """The step that was saved."""
    data: Any
    """The data position that was saved with it."""


class Checkpoints:
    """A folder of checkpoints of one training run.

    A checkpoint has weights, optimizer, scheduler, random generators, step and data position, by
    the names of the whole model: it may be loaded on another number of ranks, with another cut or
    schedule. It is complete or absent, whenever a process ends.

    Every rank makes it and calls `save`, `load` and `wait` alike. One run at a time writes to a
    folder, which all ranks see.

    Example:
        >>> with Checkpoints("run/checkpoints", keep_last=2) as checkpoints:
        ...     checkpoints.save(step, ap, optimizer, scheduler, data=step, asynchronous=True)

    Args:
        folder: Where they are; made when first written to.
        keep_last: How many of the newest checkpoints to keep; None keeps all.
        keep_every: Keep those whose step is a multiple of this as well.
        group: The ranks; None for all.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep_last: int | None = None,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        problems = [
            f"{name}={value!r} must be an integer of at least 1, or None"
            for name, value in (("keep_last", keep_last), ("keep_every", keep_every))
            if value is not None and (not isinstance(value, int) or value < 1)
        ]
        if keep_every is not None and keep_last is None:
            problems.append(
                f"keep_every={keep_every} without keep_last, which keeps all: give keep_last too"
            )
        refuse("Checkpoints cannot be made", problems)
        self._folder = CheckpointFolder(folder, keep_last, keep_every)
        self._ranks = Ranks(group)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        pipeline: AutoPipeline | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        data: Any = None,
        asynchronous: bool = False,
    ) -> None:
        """Save the state of training after a step; it is the latest checkpoint from then on.

        A save that is still running is waited for first.

        Args:
            step: The number of the step.
            pipeline: The pipeline, or this rank's modules, whose parameter names must be those of
                the whole model.
            optimizer: Over this rank's parameters, or several; none where a rank has none.
            scheduler: Of the learning rate, or one per optimizer, which step alike.
            data: The data position, the same on every rank: plain values and tensors, or an object
                with a `state_dict`.
            asynchronous: Return once everything is copied to the CPU, and write in the background.
                An error is raised by the next `save`, `load` or `wait`.

        Raises:
            ValueError: On every rank, if something cannot be saved.
            RuntimeError: On every rank, if a rank could not write. Checkpoints that were there
                before are as they were.
        """
        self.wait()
        state = TrainingState(pipeline, optimizer, scheduler)
        problems, tensors = state.problems(), {}
        if not isinstance(step, int) or step < 0:
            problems.append(f"step={step!r} must be an integer of at least 0")
        try:
            tensors = {} if problems else state.read(step, data, self._ranks.rank)
        except ValueError as error:
            problems.append(str(error))
        except Exception as error:  # of the user's own `state_dict`: no rank waits for another
            problems.append(f"{type(error).__name__}: {error}")
        if self._ranks.rank == 0:
            self._folder.remove_leftovers()
        everyone = self._ranks.gather((step, problems))
        found = [problem for _, problems in everyone for problem in problems]
        if any(other != everyone[0][0] for other, _ in everyone):
            found.append(f"the ranks gave different steps: {[other for other, _ in everyone]}")
        refuse("the checkpoint cannot be saved", list(dict.fromkeys(found)))
        writer = DiskWriter(self._folder.partial(step))
        if asynchronous:
            written = async_save(tensors, storage_writer=writer, process_group=self._ranks.group)
            assert isinstance(written, Future)
            self._pending = self._background.submit(self._complete, step, written.result)
        else:
            write = partial(save, tensors, storage_writer=writer, process_group=self._ranks.group)
            self._complete(step, write)

    def load(
        self,
        pipeline: AutoPipeline | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        step: int | None = None,
        data: Any = None,
    ) -> Resumed:
        """Go on from a checkpoint: everything gets the state that was saved.

        Optimizers and schedulers are made as at the start of training, after `materialize`, and
        need not have stepped. Learning rates and the other settings of parameter groups are those
        of the checkpoint.

        Args:
            pipeline: As for `save`; cut in any way.
            optimizer: As for `save`; with parameters grouped in any way that keeps apart what had
                different settings.
            scheduler: As for `save`.
            step: Of which step; None for the latest.
            data: What the data position is given to, if it has a `load_state_dict`.

        Raises:
            FileNotFoundError: On every rank, if there is no such checkpoint.
            ValueError: On every rank, before anything is changed, if it is one of another model,
                optimizer or scheduler.
            RuntimeError: On every rank, if a rank could not read it.
        """
        self.wait()
        step, saved = self._find(step)
        name = f"the checkpoint {self._folder.of(step)}"
        state = TrainingState(pipeline, optimizer, scheduler)
        everyone = self._ranks.gather((state.claims(), state.problems() + state.misfits(saved)))
        wanted = set().union(*(claims for claims, _ in everyone))
        problems = claim_problems(wanted, claims_of(saved))
        problems += [problem for _, others in everyone for problem in others]
        _refuse_all(f"{name} is not of this model, optimizer and scheduler", problems)
        packed = state.packed_targets(saved, self._ranks.rank)
        self._read(step, packed)
        problems = [
            p for others in self._ranks.gather(state.group_problems(packed)) for p in others
        ]
        _refuse_all(f"{name} does not fit this optimizer", problems)
        tensors = state.targets(saved)
        self._read(step, tensors)
        resumed = Resumed(*state.set(packed, tensors, self._ranks.rank))
        if hasattr(data, "load_state_dict"):
            data.load_state_dict(resumed.data)
        return resumed

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return self._folder.steps()

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last; None if there is none."""
        return self._folder.latest()

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error; on every rank alike."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except RuntimeError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # what ended the block is raised

    def _complete(self, step: int, write: Callable[[], Any]) -> None:
        """Write, then let one rank publish; all ranks raise, or none."""
        failure = None
        try:
            write()
        except CheckpointException as error:  # the same on every rank
            failure = self._reasons(error)
        if self._ranks.rank == 0:
            try:
                if failure is None:
                    self._folder.publish(step, self._ranks.size)
            except OSError as error:
                failure = f"rank {self._ranks.global_rank(0)}: {type(error).__name__}: {error}"
            if failure is not None:
                self._folder.discard(step)
        if (failure := self._ranks.from_first(failure)) is not None:
            raise RuntimeError(
                f"the checkpoint {self._folder.of(step)} could not be saved, and those before are "
                f"as they were: {failure}"
            )

    def _find(self, step: int | None) -> tuple[int, SavedTensors]:
        """Return a checkpoint's step and what tensors it has, the same on every rank."""
        found: Any = None
        if self._ranks.rank == 0:
            try:
                self._folder.restore()
                complete = self._folder.steps()
                chosen = self._folder.latest() if step is None else step
                if chosen not in complete:
                    of_step = "" if step is None else f" of step {step}"
                    there = f"; it has steps {complete[-10:]}" if complete else ""
                    raise FileNotFoundError(
                        f"there is no complete checkpoint{of_step} in {self._folder.path}{there}"
                    )
                metadata = FileSystemReader(self._folder.of(chosen)).read_metadata()
                entries = metadata.state_dict_metadata.items()
                found = (
                    chosen,
                    {
                        key: (entry.size, entry.properties.dtype)
                        for key, entry in entries
                        if isinstance(entry, TensorStorageMetadata)
                    },
                )
            except FileNotFoundError as error:
                found = error
            except Exception as error:  # whatever a damaged file leads to
                found = RuntimeError(
                    f"the checkpoints in {self._folder.path} cannot be read: "
                    f"{type(error).__name__}: {error}"
                )
        found = self._ranks.from_first(found)
        if isinstance(found, Exception):
            raise found
        chosen, saved = found
        return chosen, saved

    def _read(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        reader = FileSystemReader(self._folder.of(step))
        try:
            load(tensors, storage_reader=reader, process_group=self._ranks.group)
        except CheckpointException as error:
            raise RuntimeError(
                f"the checkpoint {self._folder.of(step)} cannot be read: {self._reasons(error)}"
            ) from None

    def _reasons(self, error: CheckpointException) -> str:
        return "; ".join(
            f"rank {self._ranks.global_rank(rank)}: {type(reason).__name__}: {reason}"
            for rank, (reason, _) in sorted(error.failures.items())
        )


def _refuse_all(what: str, problems: list[str]) -> None:
    distinct = list(dict.fromkeys(problems))
    refuse(f"{what} ({len(distinct)} differences)", distinct)
