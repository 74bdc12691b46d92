"""What torch's runtime costs per action: stages that do next to nothing, on one rank and on two.

    python benchmarks/actions.py

Time divided by the actions of a rank: medians over the steps, of the rank that took most. `CPU` is
that of the thread that runs the schedule, `all` that of all threads: gloo has some that carry its
messages. `bare` is the same forward, loss and backward without a schedule, whose cost is the
stage's and autograd's own. The recorder runs along; it costs some microseconds per action.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from pipelines import Pipeline, run
from torch import nn

from pp_schedule import Order, zb_h1_order
from pp_schedule.orders import one_f_one_b_order

MICROBATCHES = 64
Figures = list[float]
"""Seconds per action: CPU time of the schedule's thread, of all threads, and wall time."""
WAYS: dict[str, tuple[int, str | Callable[[int, int], Order]]] = {
    "1f1b, torch's class": (1, "1f1b"),
    "1f1b, runtime": (1, one_f_one_b_order),
    "zb_h1, runtime": (1, zb_h1_order),
    "interleaved_1f1b": (2, "interleaved_1f1b"),
    "zero_bubble": (2, "zero_bubble"),
}
"""Schedules, with their stages per rank."""


class EmptyStage(nn.Module):
    """One product of two numbers."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.weight


def measure(pp_size: int, steps: int) -> dict[str, Figures]:
    """Return the figures of each schedule."""
    pipelines = []
    for stages_per_rank, made_by in WAYS.values():
        schedule = made_by if isinstance(made_by, str) else made_by(pp_size, MICROBATCHES)
        num_stages = stages_per_rank * pp_size
        pipelines.append(
            Pipeline(schedule, EmptyStage, num_stages, pp_size, MICROBATCHES, torch.ones(1, 1))
        )
    rows = {}
    for name, found in zip(WAYS, run(pipelines, steps), strict=True):
        actions = max(sum(action is not None for action in row) for row in found.order.values())
        times = [(step.cpu, step.cpu_of_all, step.wall) for step in found.steps]
        rows[name] = [median(taken) / actions for taken in zip(*times, strict=True)]
    return rows


def measure_bare(steps: int) -> Figures:
    """Return the figures of a forward or backward without a schedule."""
    stage, x = EmptyStage(), torch.ones(1, 1)
    clocks = (time.thread_time, time.process_time, time.perf_counter)
    taken = []
    for _ in range(steps):
        before = [clock() for clock in clocks]
        for _ in range(MICROBATCHES):
            nn.functional.mse_loss(stage(x), x).backward()
        taken.append([clock() - start for clock, start in zip(clocks, before, strict=True)])
    return [median(times) / (2 * MICROBATCHES) for times in zip(*taken, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'ranks':>5}  {'schedule':<22}{'CPU':>9}{'all':>9}{'wall':>9}  (us per action)")
    rows = {(1, "bare"): measure_bare(arguments.steps)}
    for pp_size in (1, 2):
        for name, figures in measure(pp_size, arguments.steps).items():
            rows[pp_size, name] = figures
    for (pp_size, name), figures in rows.items():
        times = "".join(f"{1e6 * seconds:>9.0f}" for seconds in figures)
        print(f"{pp_size:>5}  {name:<22}{times}")
        if arguments.json:
            with arguments.json.open("a") as file:
                row = {"ranks": pp_size, "schedule": name, "figures": figures}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
