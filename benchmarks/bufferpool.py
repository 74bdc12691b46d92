"""Memory of receives with and without a pool, and what a step takes.

    python benchmarks/bufferpool.py

Another torch: `uv run --isolated --with 'torch==2.13.*' benchmarks/bufferpool.py`.

Memory: four ranks, a receive of 1 MB, fresh processes for each line. Receives are counted where
they are posted, for as long as their tensors exist; `resident` is how much the peak of a process's
private memory grew beyond what it had before its pipeline was built. Time: two ranks, steps
without, with, with, without and so on in turn; medians over the steps of the rank that took most,
as the ratio of with to without, and of the last to the first as a control.
"""

import argparse
import json
import multiprocessing
import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
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

from pp_bufferpool import install_recv_buffer_pool, recv_buffer_counts
from pp_schedule import build_pipeline_schedule, resolve_schedule, stage_ids_this_rank

Row = dict[str, Any]
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "v_schedule", "dualpipev")
SLACK = 2


class Part(nn.Module):
    """A stage that saves its input for its backward, and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.weight


class Pipeline:
    """This rank's stages and their schedule; `step` runs once."""

    def __init__(
        self, name: str, num_microbatches: int, width: int, make: Callable[[], nn.Module] = Part
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        spec = resolve_schedule(name)
        num_stages = size if spec.single_stage else 2 * size
        ids = stage_ids_this_rank(rank, size, num_stages, spec.style)
        meta = torch.empty(1, width, device="meta")
        hidden = meta.clone().requires_grad_()
        self.stages = [
            PipelineStage(
                make(), index, num_stages, torch.device("cpu"),
                input_args=(hidden if index else meta,), output_args=(hidden,),
            )
            for index in ids
        ]  # fmt: skip
        self.schedule = build_pipeline_schedule(
            None, name, 1, num_microbatches, self.stages, lambda output, target: output.sum()
        )
        batch = torch.ones(1, 1).expand(num_microbatches, width)  # takes no memory
        self._inputs = [batch] if 0 in ids else []
        self._target = batch if num_stages - 1 in ids else None

    def step(self) -> None:
        """Run a step without keeping anything of it."""
        self.schedule.step(*self._inputs, target=self._target, return_outputs=False)
        for stage in self.stages:
            stage.submod.zero_grad()


class Receives:
    """Counts the tensors that a pipeline receives into, while they exist."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.posted = self.allocated = self.live = self.peak = 0
        self._known: set[int] = set()
        for stage in pipeline.stages:
            for method in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
                vars(stage)[method] = partial(self._look, getattr(stage, method))

    def _look(self, make_ops: Callable[[int], list[Any]], microbatch: int) -> list[Any]:
        ops = make_ops(microbatch)
        for op in ops:
            self.posted += 1
            if id(op.tensor) not in self._known:
                self._known.add(id(op.tensor))
                self.allocated += 1
                self.live += 1
                self.peak = max(self.peak, self.live)
                weakref.finalize(op.tensor, self._forget, id(op.tensor)).atexit = False
        return ops

    def _forget(self, tensor: int) -> None:
        self._known.discard(tensor)
        self.live -= 1


def start(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run a function on that many ranks in fresh processes; return what each of them returned."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (folder, size, function, args), size, start_method="forkserver")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def _rank(
    rank: int, folder: str, size: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2)
    )
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


def memory(name: str, num_microbatches: int, pooled: bool, width: int) -> Row:
    """Return what this rank's receives take in three steps."""
    Pipeline("gpipe", 2, width).step()  # what gloo and autograd allocate once
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("RssAnon")
    pipeline = Pipeline(name, num_microbatches, width)
    counts = recv_buffer_counts(pipeline.schedule, SLACK)[dist.get_rank()]
    pool = install_recv_buffer_pool(pipeline.stages, pipeline.schedule, SLACK) if pooled else None
    receives = Receives(pipeline)
    for _ in range(3):
        pipeline.step()
    found = {
        "peak": receives.peak,
        "allocated": receives.allocated,
        "posted": receives.posted,
        "expected": counts.with_pool if pooled else counts.without_pool,
        "resident": _status("VmHWM") - _status("VmRSS") + _status("RssAnon") - before,
    }
    if pool is not None:
        stats = pool.stats()
        found |= {"slots": stats.buffers, "slot_bytes": stats.bytes, "fallbacks": stats.fallbacks}
        found["allocated"] = stats.allocations
    return found


def _status(field: str) -> int:
    """Bytes of a line in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


class Layers(nn.Module):
    """A stage that takes about as long as a receive of its width, many times over."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to each row of a microbatch."""
        y: torch.Tensor = self.layer(x.view(-1, self.layer.in_features)).view_as(x)
        return y


def seconds(name: str, num_microbatches: int, width: int, rounds: int) -> list[list[float]]:
    """Return per round what the slowest rank took without a pool, twice with it, and without."""
    plain = Pipeline(name, num_microbatches, width, Layers)
    pooled = Pipeline(name, num_microbatches, width, Layers)
    install_recv_buffer_pool(pooled.stages, pooled.schedule, SLACK)
    taken = []
    for number in range(rounds + 1):
        found = []
        for pipeline in (plain, pooled, pooled, plain):
            dist.barrier()
            begin = time.perf_counter()
            pipeline.step()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.append(took.item())
        if number:
            taken.append(found)
    return taken


def main() -> None:
    """Print both tables, and append them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="*", default=[8, 32, 128, 256])
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    # Forked from a process that has imported torch: importing takes longer than the steps.
    multiprocessing.set_forkserver_preload(["torch.distributed.pipelining", "pp_bufferpool.pool"])
    width = 2**18  # 1 MB
    print(f"torch {torch.__version__}, 4 ranks, receives of 1 MB, slack {SLACK}; by rank:")
    rows = []
    for name in args.schedules:
        for count in args.microbatches:
            plain, pooled = (start(memory, 4, name, count, way, width) for way in (False, True))
            rows.append({"schedule": name, "microbatches": count, "plain": plain, "pool": pooled})
            print(
                f"{name:17} n {count:3}"
                f"  without: live {_list(plain, 'peak')} (order: {_list(plain, 'expected')})"
                f" resident MB {_list(plain, 'resident', 1e6)}"
                f"  pool: slots {_list(pooled, 'slots')} (order: {_list(pooled, 'expected')})"
                f" live {_list(pooled, 'peak')} resident MB {_list(pooled, 'resident', 1e6)}"
                f"  allocations {sum(row['allocated'] for row in plain)}"
                f" -> {sum(row['allocated'] for row in pooled)}",
                flush=True,
            )
    times = []
    for name in args.schedules:
        for wide in (2**14, 2**20):
            taken = start(seconds, 2, name, 16, wide, args.rounds)[0]
            first, *on, last = (median(column) for column in zip(*taken, strict=True))
            off = (first + last) / 2
            ratio, control = sum(on) / 2 / off, last / first
            times.append({"schedule": name, "bytes": 4 * wide, "step": off, "ratio": ratio})
            print(
                f"{name:17} receives of {4 * wide / 1024:6.0f} kB: a step {off * 1e3:7.1f} ms, "
                f"with the pool x {ratio:.3f}, control x {control:.3f}",
                flush=True,
            )
    if args.json:
        with args.json.open("a") as file:
            line = {"torch": torch.__version__, "memory": rows, "time": times}
            file.write(json.dumps(line) + "\n")


def _list(rows: Sequence[Row], name: str, unit: float = 1) -> str:
    return ",".join(f"{row[name] / unit:.0f}" for row in rows)


if __name__ == "__main__":
    main()
