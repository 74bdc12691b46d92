"""Stages that are even by cost: another split than by layers, and the same numbers."""

from typing import Any

import pytest
from harness import RankPool
from oracle import Case, build, compare, run_rank, run_whole

from pp_autopipeline import Balance, Costs
from pp_schedule import LayerCosts

# A head that is worth some layers, and one that is worth more than a rank's share.
LARGE, HUGE = {"vocab_size": 700}, {"vocab_size": 2400}
ONE, THREE = LayerCosts(1, 1, 1), LayerCosts(3, 3, 3)


def split(case: Case) -> tuple[list[int], Balance, str]:
    """Layers of every stage, how even that is, and the summary."""
    ap = build(case)
    counts = [
        sum(name.rpartition(".")[2].isdecimal() for name in summary.modules)
        for summary in ap.stage_summaries
    ]
    assert ap.balance_report is not None
    return counts, ap.balance_report, ap.debug_summary()


@pytest.mark.parametrize(
    ("family", "schedule", "world_size", "num_layers", "overrides", "counts"),
    [
        ("llama", "1f1b", 2, 6, LARGE, [4, 2]),
        ("llama", "1f1b", 4, 8, HUGE, [3, 3, 2, 0]),
        ("gpt2", "1f1b", 2, 4, {**HUGE, "tie_word_embeddings": True}, [4, 0]),
        ("llama", "v_schedule", 2, 6, HUGE, [0, 3, 3, 0]),
        ("llama", "v_schedule", 4, 10, LARGE, [1, 2, 2, 2, 1, 1, 1, 0]),
        ("llama", "zero_bubble", 2, 6, HUGE, [3, 0, 3, 0]),
    ],
)
def test_a_split_by_cost_is_another_and_exact(
    ranks: RankPool,
    family: str,
    schedule: str,
    world_size: int,
    num_layers: int,
    overrides: dict[str, Any],
    counts: list[int],
) -> None:
    case = Case(family, schedule, (num_layers,), "uneven", overrides=overrides, balance="cost")
    runs = ranks.run(world_size, split, case)
    report, summary = runs[0][1:]
    assert all(run[:2] == (counts, report) for run in runs)
    assert report.even_counts != tuple(counts) == report.layer_counts
    assert report.ratio < report.even_ratio - 0.2
    assert (
        f"{report.ratio:.2f} x its ideal share (spread evenly {report.even_ratio:.2f} x)" in summary
    )
    assert f"{report.heaviest:.3g} FLOPs" in summary
    compare(run_whole(case), ranks.run(world_size, run_rank, case), rtol=1e-9)


@pytest.mark.parametrize(
    ("first", "last", "counts", "heaviest"),
    [
        (THREE, LayerCosts(), [0, 3], "pipeline rank 0 (stages 0)"),
        (LayerCosts(), THREE, [3, 0], "pipeline rank 0 (stages 0)"),
        (LayerCosts(), ONE, [2, 1], "pipeline rank 0 (stages 0)"),
        (ONE, THREE, [3, 0], "pipeline rank 0 (stages 0)"),
    ],
)
def test_costs_that_are_given(
    ranks: RankPool, first: LayerCosts, last: LayerCosts, counts: list[int], heaviest: str
) -> None:
    case = Case("llama", "1f1b", (3,), "padded", balance=Costs([ONE] * 3, first, last))
    runs = ranks.run(2, split, case)
    assert [run[0] for run in runs] == [counts] * 2
    assert heaviest in runs[1][2]
    compare(run_whole(case), ranks.run(2, run_rank, case), rtol=1e-9)
