"""Simulated peaks of activations against torch's own analysis of its finished programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining as torch_pipelining

from pp_schedule import (
    Order,
    StageCosts,
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)
from pp_schedule.orders import gpipe_order, one_f_one_b_order
from pp_schedule.v_orders import v_half_order, v_min_order
from pp_schedule.zero_bubble_orders import zb_h1_order, zb_h2_order

pytestmark = pytest.mark.skipif(
    not hasattr(torch_pipelining, "analyze_pipeline_activation_liveness"),
    reason="torch analyses the liveness of activations since 2.15",
)
SIZES = [(1, 4), (2, 4), (2, 8), (3, 9), (4, 8), (4, 16), (8, 16), (8, 32)]


def slots(schedule: Any, order: Order) -> list[int]:
    """How many activations of a stage and a microbatch each rank must hold, as torch counts."""
    return [
        torch_pipelining.analyze_pipeline_activation_liveness(
            schedule,
            pp_rank=rank,
            stage_indices=sorted({action.stage_index for action in row if action}),
            granularity="stage_microbatch",
        ).num_slots
        for rank, row in order.items()
    ]


def peaks(order: Order) -> list[float]:
    return list(simulate(order, StageCosts(activation_bytes=1.0)).peak_memory)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "v"),
    [
        *[(name, v) for name in ("looped_bfs", "interleaved_1f1b") for v in (1, 2, 3)],
        *[("zero_bubble", v) for v in (1, 2, 4)],
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_peaks_of_torchs_schedules(
    name: str, v: int, p: int, m: int, fake_stages: Callable[..., list[Any]]
) -> None:
    spec = resolve_schedule(name)
    assert spec.check(p, v * p, m) == []
    stages = fake_stages(0, p, stage_ids_this_rank(0, p, v * p, spec.style), v * p)
    schedule = build_pipeline_schedule(None, name, 1, m, stages, None)
    order = schedule_order(schedule)
    assert peaks(order) == slots(schedule, order)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 3), (5, 7)])
@pytest.mark.parametrize(
    "make",
    [
        gpipe_order,
        one_f_one_b_order,
        zb_h1_order,
        zb_h2_order,
        v_half_order,
        v_min_order,
    ],
)
def test_peaks_of_orders_from_files(
    make: Callable[[int, int], Order],
    p: int,
    m: int,
    fake_stages: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    order = make(p, m)
    dump_csv(order, tmp_path / "order.csv")
    ids = tuple(sorted({action.stage_index for action in order[0] if action}))
    stages = fake_stages(0, p, ids, len(ids) * p)
    schedule = build_pipeline_schedule(str(tmp_path / "order.csv"), None, 1, m, stages, None)
    assert peaks(order) == slots(schedule, order)
