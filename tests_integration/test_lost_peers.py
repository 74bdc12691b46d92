"""A rank whose peer does not answer says who it is, and whom it exchanges tensors with."""

import time

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from harness import RankPool
from oracle import token_mean
from tiny_models import tiny_model

from pp_autopipeline import AutoPipeline, ParallelSizes, build_mesh

TIMEOUT = 2  # seconds


class Loss:
    """A loss that can be made to fail."""

    fails = False

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the loss has a mistake")
        return token_mean(logits, target)


def errors(schedule: str, what: str) -> str:
    """What the second step says where a rank stays away, or fails."""
    sizes = ParallelSizes(pp_size=3)
    mesh = build_mesh(sizes, device_type="cpu", timeout_minutes=TIMEOUT / 60).world_mesh
    loss = Loss()
    ap = AutoPipeline(mesh, pp_schedule=schedule, pp_microbatch_size=2, pp_batch_size=8)
    ap.build(
        tiny_model("llama", 6),
        loss_fn=loss,
    )
    batch = make_batch("padded", 8)
    ap.step(**batch)
    rank, said = dist.get_rank(), ""
    loss.fails = what == "fails"
    if what == "fails" or rank != 1:
        with pytest.raises(RuntimeError) as error:
            (ap.eval if what == "stays away from eval" else ap.step)(**batch)
        said = str(error.value)
    time.sleep(TIMEOUT)  # without it a rank that ends would be noticed before the timeout
    return said


@pytest.mark.parametrize(
    ("schedule", "stages", "near"),
    [
        ("1f1b", ["stage 0", "stage 2"], ["rank 1 (stage 1)", "rank 1 (stage 1)"]),
        (
            "interleaved_1f1b",
            ["stages 0, 3", "stages 2, 5"],
            [
                "rank 1 (stage 1), rank 2 (stage 2), rank 1 (stage 4)",
                "rank 1 (stage 1), rank 0 (stage 3), rank 1 (stage 4)",
            ],
        ),
    ],
)
@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_rank_that_stays_away(
    ranks: RankPool, schedule: str, stages: list[str], near: list[str], call: str
) -> None:
    first, _, last = ranks.run(3, errors, schedule, f"stays away from {call}")
    for rank, said, mine, peers in zip((0, 2), (first, last), stages, near, strict=True):
        assert said.startswith(f"rank {rank} (pipeline rank {rank} of 3, {mine}) lost another")
        assert f"exchanges tensors of the pipeline with {peers}.\n" in said
    # The one that is first closes its connections, which may be what the other notices.
    assert f"Timed out waiting {TIMEOUT * 1000}ms" in first + last


def test_a_rank_that_fails(ranks: RankPool) -> None:
    first, middle, last = ranks.run(3, errors, "1f1b", "fails")
    assert last == "the loss has a mistake"
    assert "rank 0 (pipeline rank 0 of 3, stage 0) lost another rank" in first
    assert "with rank 0 (stage 0), rank 2 (stage 2)" in middle
