"""What each rank of `test_two_hosts` runs: a pipeline that trains until the link is cut.

Arguments: a folder for marker files, the number of steps whose loss counts, the timeout in minutes.
"""

import sys
import time
from pathlib import Path

import torch
from batches import make_batch
from oracle import LEARNING_RATE, token_mean
from tiny_models import tiny_model

from pp_autopipeline import AutoPipeline, ParallelSizes, build_mesh, initialize_distributed

PATIENCE = 60  # seconds of steps after the last that counts, if nobody cuts anything


def train(folder: Path, steps: int, timeout_minutes: float) -> None:
    """Print the loss of each step that counts, then say so with a file and go on."""
    torch.set_num_threads(1)
    info = initialize_distributed(backend="gloo", timeout_minutes=timeout_minutes)
    mesh = build_mesh(ParallelSizes(pp_size=2), device_type="cpu").world_mesh
    ap = AutoPipeline(mesh, pp_schedule="1f1b", pp_microbatch_size=2, pp_batch_size=8)
    ap.build(tiny_model("llama", 4), loss_fn=token_mean)
    optimizer = torch.optim.SGD(ap.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        loss = ap.step(**make_batch("padded", 8, seed=step)).loss
        assert loss is not None
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item()!r}", flush=True)  # noqa: T201
    (folder / f"trained-{info.rank}").touch()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ap.step(**make_batch("padded", 8))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
