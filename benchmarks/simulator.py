"""Simulated steps beside steps that torch's runtime took, on ranks of this machine over gloo.

    python benchmarks/simulator.py

Sleeping stages, on more ranks than there are cores: their times are given and uneven. `bare` is the
simulation of these times alone. For `simulated`, what an action and a message take besides is added:
three means, from a schedule that is not in the table (ZB-H2) with other times, on as many ranks.
Nothing is fitted to the table's own steps.

Real stages, transformer layers of one thread per rank: costs are measured in two recorded schedules
of each split, one with whole backwards and one with halves; the other rows are predictions. More
ranks than cores wait for each other's cores, which no simulation knows.

`measured` is the median of the steps, from the start of the first action to the end of the last on
any rank; `call` is the slowest rank's whole call. The ratio is measured over simulated. `points` is
the largest difference of a rank's idle share, in hundredths of the step. `others` is how many cores
other processes used meanwhile. Only the half of the steps counts in which they used least.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median

from layers import layers_pipeline, measure_layers
from pauses import Pauses
from pipelines import Run, run
from sleeping import sleeping_pipeline

from pp_schedule import Order, StageCosts, simulate, v_half_order, zb_h1_order, zb_h2_order

MADE: Mapping[str, Callable[[int, int], Order]] = {
    "zb_h1": zb_h1_order,
    "zb_h2": zb_h2_order,
    "v_half": v_half_order,
}
"""Orders that run from a file."""
SLEEPING = {
    **dict.fromkeys(("gpipe", "1f1b", "zb_h1"), 1),
    **dict.fromkeys(("looped_bfs", "interleaved_1f1b", "zero_bubble"), 2),
    **dict.fromkeys(("zbv", "dualpipev", "v_half"), 2),
}
"""Schedules of sleeping stages, with their stages per rank."""
LAYERS = {
    1: ("1f1b", "zb_h1", "gpipe", "zb_h2"),
    2: ("interleaved_1f1b", "zero_bubble", "looped_bfs", "zbv", "dualpipev", "v_half"),
}
"""Schedules of real stages, by their stages per rank; the first two of each yield the costs."""


@dataclass(frozen=True)
class Row:
    """One schedule, simulated and measured; times in seconds."""

    stages: str
    ranks: int
    schedule: str
    bare: float
    simulated: float
    measured: float
    call: float
    others: float
    points: float
    predicted: bool = True
    """Whether nothing of its costs was measured in this very schedule."""

    @property
    def ratio(self) -> float:
        """Measured over simulated."""
        return self.measured / self.simulated

    def __str__(self) -> str:
        times = (self.bare, self.simulated, self.measured, self.call)
        return (
            f"{self.stages:<10}{self.ranks:>5}  {self.schedule:<17}"
            + "".join(f"{1e3 * seconds:>10.1f}" for seconds in times)
            + f"{self.ratio:>8.3f}{self.points:>8.2f}{self.others:>8.2f}"
            + ("" if self.predicted else "  costs from here")
        )


HEAD = f"{'stages':<10}{'ranks':>5}  {'schedule':<17}" + "".join(
    f"{name:>{width}}"
    for name, width in (
        *dict.fromkeys(("bare", "simulated", "measured", "call"), 10).items(),
        *dict.fromkeys(("ratio", "points", "others"), 8).items(),
    )
)


def compare(
    stages: str, name: str, found: Run, work: StageCosts, pauses: Pauses, predicted: bool = True
) -> Row:
    """Simulate what was measured.

    In `work` are the times of actions alone. A rank counts as idle between actions, as it does in
    a recording, but not while an action takes more than its work.
    """
    latency = max(0.0, pauses.message - pauses.between)
    all_told = replace(work, overhead=pauses.within + pauses.between, latency=latency)
    makespan = simulate(found.order, all_told).makespan
    busy = replace(work, overhead=pauses.within)
    idle = [
        1.0 - sum(busy.of(action) for action in row if action) / makespan
        for row in found.order.values()
    ]
    return Row(
        stages,
        len(found.order),
        name,
        simulate(found.order, work).makespan,
        makespan,
        found.seconds,
        median(step.wall for step in found.steps),
        median(step.others for step in found.steps),
        100 * max(abs(a - b) for a, b in zip(idle, found.bubbles, strict=True)),
        predicted,
    )


def compare_sleeping(pp_size: int, steps: int, seed: int) -> Iterator[Row]:
    """Run the schedules of sleeping stages on so many ranks."""
    random, m = Random(seed), 2 * pp_size
    work = [StageCosts(*[[0.02] * pp_size] * 3)]
    pipelines = [sleeping_pipeline(zb_h2_order(pp_size, m), work[0], pp_size, m)]
    for name, v in SLEEPING.items():
        low, high = (0.02, 0.04) if v == 1 else (0.015, 0.03)
        kinds = ([random.uniform(low, high) for _ in range(v * pp_size)] for _ in "FIW")
        work.append(StageCosts(*kinds))
        schedule = MADE[name](pp_size, m) if name in MADE else name
        pipelines.append(sleeping_pipeline(schedule, work[-1], pp_size, m))
    calibration, *runs = run(pipelines, steps)
    pauses = Pauses.of((step.timeline for step in calibration.steps), work[0])
    print(f"sleeping, {pp_size} ranks: {pauses}")
    for name, found, times in zip(SLEEPING, runs, work[1:], strict=True):
        yield compare("sleeping", name, found, times, pauses)


def compare_layers(pp_size: int, steps: int) -> Iterator[Row]:
    """Run the schedules of real stages on so many ranks."""
    m = 2 * pp_size
    pipelines = {
        name: layers_pipeline(
            MADE[name](pp_size, m) if name in MADE else name, v * pp_size, pp_size, m
        )
        for v, names in LAYERS.items()
        for name in names
    }
    runs = dict(zip(pipelines, run(list(pipelines.values()), steps), strict=True))
    for v, (whole, halves, *others) in LAYERS.items():
        work = measure_layers(runs[whole], runs[halves])
        sources = runs[whole].steps + runs[halves].steps
        pauses = Pauses.of(step.timeline for step in sources)
        split = fmean(work.per_stage("split_factor", v * pp_size)[1:])
        print(
            f"layers, {pp_size} ranks, {v} per rank: {pauses}; both halves of a backward take "
            f"{split:.2f} of the whole"
        )
        for name in (whole, halves, *others):
            yield compare("layers", name, runs[name], work, pauses, name in others)


def verdicts(rows: list[Row], cores: int) -> Iterator[str]:
    """Tell of each target the figure, and whether it holds."""
    sleeping = [row for row in rows if row.stages == "sleeping"]
    layers = [row for row in rows if row.stages == "layers" and row.predicted]
    for kind, chosen, typical, most in (
        ("sleeping stages", sleeping, 0.05, 0.10),
        ("layers, as many ranks as cores", [r for r in layers if r.ranks <= cores], 0.10, 0.10),
        ("layers, more ranks than cores", [r for r in layers if r.ranks > cores], None, None),
    ):
        if not chosen:
            continue
        errors = [abs(row.ratio - 1.0) for row in chosen]
        for what, figure, limit in (
            ("median error of the step", median(errors), typical),
            ("largest error of the step", max(errors), most),
            ("largest error of an idle share", max(row.points for row in chosen) / 100, 0.03),
        ):
            verdict = "no target"
            if typical:
                assert limit
                verdict = f"target {limit:.0%}, {'held' if figure <= limit else 'NOT HELD'}"
            yield f"{kind}: {what} {figure:.1%} ({verdict})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="of sleeping stages, per schedule")
    parser.add_argument("--layer-steps", type=int, default=10, help="of layers, per schedule")
    parser.add_argument("--sleeping", type=int, nargs="*", default=[4, 8], help="numbers of ranks")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--cores", type=int, default=2, help="how many ranks can run at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the sleeping times")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    print(HEAD + "  (times in ms)")
    rows: list[Row] = []
    for pp_size in arguments.sleeping:
        for row in compare_sleeping(pp_size, arguments.steps, arguments.seed):
            print(row, flush=True)
            rows.append(row)
    for pp_size in arguments.layers:
        for row in compare_layers(pp_size, arguments.layer_steps):
            print(row, flush=True)
            rows.append(row)
    print(*verdicts(rows, arguments.cores), sep="\n")
    if arguments.json:
        with arguments.json.open("a") as file:
            file.write(json.dumps([asdict(row) for row in rows]) + "\n")


if __name__ == "__main__":
    main()
