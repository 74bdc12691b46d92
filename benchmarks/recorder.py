"""What recording costs: steps with `record` beside steps without, in turn, in one run.

    torchrun --nproc-per-node=2 benchmarks/recorder.py

1F1B with a stage of two layers per rank, at several widths, from an action that is nearly nothing
to one of some milliseconds. Each round takes steps without, with, and without again. The table has
the medians over the rounds of the largest over the ranks, of wall time and of CPU time: without,
the ratio of the second to the first, and as a control that of the third to the first. All clocks
are one machine's, so the offset that the alignment finds is its error.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_schedule import build_pipeline_schedule, record
from pp_schedule.clocks import align_clocks

MICROBATCHES, ROWS = 16, 64
Row = dict[str, float]


def measure(width: int, rounds: int) -> Row:
    """Return the figures of one width, in seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    loss_fn = nn.functional.mse_loss
    batch_size = ROWS * MICROBATCHES
    schedule = build_pipeline_schedule(None, "1f1b", ROWS, batch_size, [stage], loss_fn)
    batch = torch.randn(batch_size, width)
    given = [batch] if stage.is_first else []
    times: dict[str, list[list[float]]] = {"off": [], "on": [], "again": []}
    recording = None
    for number in range(rounds + 2):
        for name, found in times.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            with record(schedule) if name == "on" else nullcontext() as recorder:
                schedule.step(*given, target=batch if stage.is_last else None, return_outputs=False)
            took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            recording = recorder or recording
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= 2:  # the first steps set up
                found.append(took.tolist())
    assert recording is not None
    timeline = recording.timeline()
    row = {"width": width, "action": median(span.end - span.start for span in timeline.spans)}
    for place, clock in enumerate(("wall", "cpu")):
        off, on, again = (median(took[place] for took in found) for found in times.values())
        row |= {clock: off, f"{clock}_ratio": on / off, f"{clock}_control": again / off}
    return row


def per_action(calls: int = 20_000) -> float:
    """Return the CPU seconds that recording adds to an action, from one that does nothing."""
    stage = PipelineStage(
        nn.Linear(1, 1), dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    )
    loss_fn = nn.functional.mse_loss
    schedule = build_pipeline_schedule(None, "gpipe", 1, 1, [stage], loss_fn)
    stage.forward_one_chunk = lambda microbatch: None
    found: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(10):
        for name, times in found.items():
            with record(schedule) if name == "on" else nullcontext():
                start = time.process_time()
                for number in range(calls):
                    stage.forward_one_chunk(number)
                times.append(time.process_time() - start)
    return (median(found["on"]) - median(found["off"])) / calls


def clock_errors(tries: int) -> tuple[float, float]:
    """Return the largest wrong of the alignment and its largest bound, on one machine's clock."""
    found = [align_clocks(None, torch.device("cpu")) for _ in range(tries)]
    worst = torch.tensor([max(abs(f.seconds) for f in found), max(f.error for f in found)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst[0].item(), worst[1].item()


def main() -> None:
    """Measure on every rank and print a table on the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = [measure(width, arguments.rounds) for width in (16, 256, 1024)]
    wrong_by, bound = clock_errors(20)
    added = per_action()
    if dist.get_rank() == 0:
        columns = "".join(f"{c:>10}{'on/off':>8}{'control':>9}" for c in ("wall", "CPU"))
        print(f"{'width':>6}{'action':>11}{columns}")
        for row in rows:
            columns = "".join(
                f"{1e3 * row[c]:>7.2f} ms{row[f'{c}_ratio']:>8.3f}{row[f'{c}_control']:>9.3f}"
                for c in ("wall", "cpu")
            )
            print(f"{row['width']:>6.0f}{1e6 * row['action']:>8.0f} us{columns}")
        print(f"an action costs {1e6 * added:.1f} us more")
        print(f"clocks: wrong by up to {1e6 * wrong_by:.0f} us, bound {1e6 * bound:.0f} us")
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(rows) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
