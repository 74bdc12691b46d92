"""What building a schedule costs a rank, beside torch's own way: 64 ranks, 256 microbatches.

    python benchmarks/set_up.py

CPU seconds of one process that stands for one rank of a world in which nothing is sent; our way
and torch's in turn, medians.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from pp_schedule import (
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)

NAMES = ("looped_bfs", "interleaved_1f1b", "zero_bubble", "v_schedule", "dualpipev")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    size, number = arguments.ranks, arguments.microbatches
    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    print(f"{'schedule':<18}{'ours':>8}{'torch':>8}{'ratio':>8}{'CSV':>8}{'CSV comm.':>11}")
    for name in NAMES:
        row = measure(name, size, number, arguments.rounds)
        print(f"{name:<18}" + "".join(f"{row[k]:>{w}.2f}" for k, w in COLUMNS))
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"schedule": name, **row}) + "\n")
    dist.destroy_process_group()


COLUMNS = (("ours", 8), ("torch", 8), ("ratio", 8), ("csv", 8), ("csv_comm", 11))


def measure(name: str, size: int, number: int, rounds: int) -> dict[str, float]:
    """Return medians of CPU seconds."""
    spec = resolve_schedule(name)
    ids = stage_ids_this_rank(size - 1, size, 2 * size, spec.style)
    module, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
    stages = [PipelineStage(module, index, 2 * size, cpu) for index in ids]

    def build(path: Path | None = None) -> Any:
        csv = None if path is None else str(path)
        return build_pipeline_schedule(csv, None if path else name, 1, number, stages, None)

    with tempfile.TemporaryDirectory() as folder:
        plain, full = Path(folder, "plain.csv"), Path(folder, "full.csv")
        order = schedule_order(build())
        dump_csv(order, plain)
        dump_csv(order, full, with_communication=True)
        ways: dict[str, Callable[[], Any]] = {
            "ours": build,
            "torch": lambda: spec.cls(stages, number),  # type: ignore[arg-type]
            "csv": lambda: build(plain),
            "csv_comm": lambda: build(full),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                started = time.process_time()
                run()
                seconds[way].append(time.process_time() - started)
    found = {way: median(each) for way, each in seconds.items()}
    return {**found, "ratio": found["torch"] / found["ours"]}


if __name__ == "__main__":
    main()
