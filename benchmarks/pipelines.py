"""Steps of pipelines on real ranks of this machine, recorded: one process per rank, over gloo.

Linux only: what other processes use of the cores is read in /proc.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.spawn import start_processes

from pp_schedule import (
    Order,
    Timeline,
    build_pipeline_schedule,
    dump_csv,
    record,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)


@dataclass(frozen=True)
class Pipeline:
    """What to run. It is pickled for the ranks, and so is what makes its stages."""

    schedule: str | Order
    """A schedule's name, or an order, which torch's runtime then runs from a file."""
    make_stage: Callable[[int], nn.Module]
    """Makes the module of a stage."""
    num_stages: int
    pp_size: int
    num_microbatches: int
    microbatch: torch.Tensor
    """Every microbatch of the batch, and its target."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        if isinstance(self.schedule, str):
            style = resolve_schedule(self.schedule).style
            return stage_ids_this_rank(rank, self.pp_size, self.num_stages, style)
        return tuple(sorted({action.stage_index for action in self.schedule[rank] if action}))


@dataclass(frozen=True)
class Step:
    """One step, measured; seconds of the rank that took, or used, most."""

    timeline: Timeline
    """All ranks, from the start of the first action to the end of the last."""
    wall: float
    """Of the whole call."""
    cpu: float
    """Of the processor, by the thread that runs the schedule."""
    cpu_of_all: float
    """Of the processor, by all threads, those of gloo included."""
    others: float
    """Cores that processes other than the ranks used meanwhile, on average."""


@dataclass(frozen=True)
class Run:
    """What was measured of one pipeline."""

    order: Order
    """What every rank ran."""
    steps: list[Step]
    """The half of the steps during which other processes used the cores least."""

    @property
    def seconds(self) -> float:
        """The median length of a step's timeline."""
        return median(step.timeline.makespan for step in self.steps)

    @property
    def bubbles(self) -> list[float]:
        """Per rank, the median share of a step in which no action runs."""
        shares = zip(*(step.timeline.bubbles for step in self.steps), strict=True)
        return [median(of_rank) for of_rank in shares]


def run(pipelines: Sequence[Pipeline], steps: int) -> list[Run]:
    """Run pipelines in fresh processes, a step of each in turn, and so on in rounds.

    Args:
        pipelines: All of one number of ranks.
        steps: Steps of each that are measured, after one that sets up.
    """
    # Forked from a process that has imported torch: importing takes longer than the steps.
    multiprocessing.set_forkserver_preload(["torch.distributed.pipelining", "pp_schedule.build"])
    with tempfile.TemporaryDirectory() as folder:
        size = pipelines[0].pp_size
        start_processes(_rank, (folder, pipelines, steps), size, start_method="forkserver")
        result: list[Run] = pickle.loads(Path(folder, "runs").read_bytes())
    return result


def _rank(rank: int, folder: str, pipelines: Sequence[Pipeline], steps: int) -> None:
    torch.set_num_threads(1)
    size = pipelines[0].pp_size
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})  # a core for each, as it would have a device
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2)
    )
    built = [
        _build(pipeline, rank, Path(folder, f"{rank}-{number}.csv"))
        for number, pipeline in enumerate(pipelines)
    ]
    for step, _ in built:
        step()
    taken: list[list[list[float]]] = [[] for _ in built]
    with ExitStack() as stack:
        recordings = [stack.enter_context(record(schedule)) for _, schedule in built]
        for _ in range(steps):
            for (step, _), found in zip(built, taken, strict=True):
                found.append(_time(step))
    runs = []
    for (_, schedule), recording, found in zip(built, recordings, taken, strict=True):
        measured = [Step(recording.timeline(n), *figures) for n, figures in enumerate(found)]
        measured.sort(key=lambda step: step.others)
        runs.append(Run(schedule_order(schedule), measured[: (steps + 1) // 2]))
    if rank == 0:
        Path(folder, "runs").write_bytes(pickle.dumps(runs))
    dist.destroy_process_group()


def _build(pipeline: Pipeline, rank: int, path: Path) -> tuple[Callable[[], None], Any]:
    """Return what runs one step of this rank, and the schedule that it belongs to."""
    stages = [
        PipelineStage(pipeline.make_stage(index), index, pipeline.num_stages, torch.device("cpu"))
        for index in pipeline.stages_of(rank)
    ]
    name, order = None, pipeline.schedule
    if isinstance(order, str):
        name = order
    else:
        dump_csv(order, path)
    rows, count = len(pipeline.microbatch), pipeline.num_microbatches
    loss_fn = nn.functional.mse_loss
    schedule = build_pipeline_schedule(
        None if name else str(path), name, rows, rows * count, stages, loss_fn
    )
    batch = torch.cat([pipeline.microbatch] * count)
    inputs = [batch] if any(stage.is_first for stage in stages) else []
    target = batch if any(stage.is_last for stage in stages) else None
    return partial(_step, schedule, stages, inputs, target), schedule


def _step(
    schedule: Any, stages: list[PipelineStage], inputs: list[torch.Tensor], target: Any
) -> None:
    schedule.step(*inputs, target=target, return_outputs=False)
    for stage in stages:
        stage.submod.zero_grad()


def _time(step: Callable[[], None]) -> list[float]:
    """Return the figures of a `Step` but for its timeline, the same on every rank."""
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    dist.barrier()
    busy, before = _busy(), [clock() for clock in clocks]
    step()
    own = [clock() - start for clock, start in zip(clocks, before, strict=True)]
    most = torch.tensor(own, dtype=torch.float64)
    together = torch.tensor(own[-1], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    wall = time.perf_counter() - before[0]
    return [*most.tolist(), max(0.0, (_busy() - busy - together.item()) / wall)]


def _busy() -> float:
    """CPU seconds that all cores together have spent so far."""
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
