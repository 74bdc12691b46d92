"""Parity: the pipelined model does what the unsplit one does, to 1e-9 in float64.

Gemma-2 runs in float32 and is held to 1e-5: its norms and its attention compute in float32
whatever the model's dtype.

Compared are the loss and the gradient norm of two AdamW steps with clipping, every gradient of
the first step and every weight after the second.

On two ranks all combinations of architecture, schedule, even and uneven split, and plain and
padded batch run. On four ranks, where a case costs seconds, a selection runs that covers every
pair of architecture and schedule once, uneven and with the hardest batch, and every schedule
once with an even split.
"""

import itertools
from functools import cache

import pytest
import torch
from harness import RankPool
from oracle import Case, Run, compare, run_rank, run_whole
from tiny_models import FAMILIES

FLOAT32 = ("gemma2",)
SINGLE_STAGE = ("1f1b", "gpipe")
MULTI_STAGE = ("interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule")
SCHEDULES = SINGLE_STAGE + MULTI_STAGE
# A stage without layers is part of the uneven splits, and so is a last stage that is a head only.
TWO_RANKS = {
    "even": {1: (2, 2), 2: (1, 1, 1, 1)},
    "uneven": {1: (1, 3), 2: (2, 0, 1, 1)},
}
FOUR_RANKS = {
    "even": {1: (1, 1, 1, 1), 2: (1, 1, 1, 1, 1, 1, 1, 1)},
    "uneven": {1: (1, 2, 1, 0), 2: (1, 0, 1, 1, 0, 1, 0, 0)},
}


def make_case(family: str, schedule: str, counts: tuple[int, ...], batch: str) -> Case:
    dtype = torch.float32 if family in FLOAT32 else torch.float64
    return Case(family, schedule, counts, batch, dtype=dtype)


@cache
def whole(family: str, num_layers: int, batch: str) -> Run:
    return run_whole(make_case(family, "1f1b", (num_layers,), batch))


def check(ranks: RankPool, world_size: int, case: Case) -> None:
    runs = ranks.run(world_size, run_rank, case, timeout=120)
    rtol = 1e-5 if case.dtype == torch.float32 else 1e-9
    compare(whole(case.family, sum(case.layer_counts), case.batch), runs, rtol)


@pytest.mark.parametrize(
    ("family", "schedule", "split", "batch"),
    list(itertools.product(FAMILIES, SCHEDULES, TWO_RANKS, ("plain", "padded"))),
)
def test_two_ranks(ranks: RankPool, family: str, schedule: str, split: str, batch: str) -> None:
    counts = TWO_RANKS[split][1 if schedule in SINGLE_STAGE else 2]
    check(ranks, 2, make_case(family, schedule, counts, batch))


@pytest.mark.parametrize(("family", "schedule"), list(itertools.product(FAMILIES, SCHEDULES)))
def test_four_ranks_uneven(ranks: RankPool, family: str, schedule: str) -> None:
    counts = FOUR_RANKS["uneven"][1 if schedule in SINGLE_STAGE else 2]
    check(ranks, 4, make_case(family, schedule, counts, "uneven"))


@pytest.mark.parametrize(
    ("family", "schedule"), list(zip(itertools.cycle(FAMILIES), SCHEDULES, strict=False))
)
def test_four_ranks_even(ranks: RankPool, family: str, schedule: str) -> None:
    counts = FOUR_RANKS["even"][1 if schedule in SINGLE_STAGE else 2]
    check(ranks, 4, make_case(family, schedule, counts, "plain"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32(ranks: RankPool, schedule: str) -> None:
    counts = TWO_RANKS["uneven"][1 if schedule in SINGLE_STAGE else 2]
    case = Case("llama", schedule, counts, "uneven", dtype=torch.float32)
    compare(run_whole(case), ranks.run(2, run_rank, case), rtol=1e-5)


@pytest.mark.parametrize("split", [(2, 1, 1, 0), (1, 1, 1, 1)])
def test_dualpipev_two_ranks(ranks: RankPool, split: tuple[int, ...]) -> None:
    check(ranks, 2, make_case("gemma2", "dualpipev", split, "uneven"))
