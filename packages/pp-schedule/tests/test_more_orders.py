"""Orders of ours beyond GPipe and 1F1B: zero bubble, V-Half, V-Min, interleaved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pp_schedule import (
    StageCosts,
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
    validate_order,
)
from pp_schedule.interleaved_orders import interleaved_1f1b_order
from pp_schedule.orders import Order, one_f_one_b_order
from pp_schedule.v_orders import v_half_order, v_min_order
from pp_schedule.zero_bubble_orders import fill_weights, zb_h1_order, zb_h2_order

SIZES = [
    (p, m) for p in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16) for m in (1, 2, 3, p, p + 1, 2 * p, 4 * p)
]


def peak(order: Order) -> float:
    """Most microbatches that a rank's stages together hold."""
    return max(simulate(order, StageCosts(activation_bytes=1)).peak_memory)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_they_run_in_their_memory(p: int, m: int) -> None:
    for make, stages_per_rank, most in (
        (zb_h1_order, 1, p),
        (zb_h2_order, 1, 2 * p - 1),
        (v_half_order, 2, p + 2),
        (v_min_order, 2, 2 * ((p + 4) // 3)),
    ):
        order = make(p, m)
        assert validate_order(order, stages_per_rank * p, m) == [], make
        assert peak(order) <= most, make


@pytest.mark.parametrize("p", [2, 3, 4, 8, 12])
def test_v_orders_are_placed_as_a_v(p: int) -> None:
    for order in (v_half_order(p, 4), v_min_order(p, 4)):
        for rank, row in order.items():
            ids = {action.stage_index for action in row if action}
            assert ids == set(stage_ids_this_rank(rank, p, 2 * p, "v"))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.7), (2.0, 2.0, 1.0)])
def test_idle_time_of_zb_h1(p: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    m = 4 * p
    idle = simulate(zb_h1_order(p, m), StageCosts(f, i, w)).makespan - m * (f + i + w)
    assert idle == pytest.approx((p - 1) * (f + i - w))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_ranks_of_zb_h2_never_wait_once_begun(p: int) -> None:
    m = 4 * p
    timeline = simulate(zb_h2_order(p, m))
    assert timeline.makespan - 3 * m == pytest.approx(p - 1)
    # Stage 0's last two units of work are one whole backward, which waits for one more.
    assert timeline.rank_spans == pytest.approx([3 * m + (rank == 0) for rank in range(p)])


@pytest.mark.parametrize("p", range(3, 17))
def test_idle_time_of_v_orders(p: int) -> None:
    """At most the papers' 1/2 and 2/3 of 1F1B's, at half and a third of its activations."""
    m = 4 * p
    of_1f1b = simulate(one_f_one_b_order(p, m)).makespan - 3 * m
    for make, share in ((v_half_order, 1 / 2), (v_min_order, 2 / 3)):
        idle = simulate(make(p, m), StageCosts(0.5, 0.5, 0.5)).makespan - 3 * m
        assert idle <= of_1f1b * share + 1e-9, make


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 12), (8, 32)])
def test_more_memory_idles_less(p: int, m: int) -> None:
    one = StageCosts()
    half = StageCosts(0.5, 0.5, 0.5)
    h1, v_half, v_min, plain = (
        simulate(order, costs).makespan
        for order, costs in (
            (zb_h1_order(p, m), one),
            (v_half_order(p, m), half),
            (v_min_order(p, m), half),
            (one_f_one_b_order(p, m), one),
        )
    )
    assert h1 < v_half < v_min < plain


def test_zb_h1_by_hand() -> None:
    order = zb_h1_order(2, 3)
    rows = {rank: " ".join(map(str, row)) for rank, row in order.items()}
    assert rows == {
        0: "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        1: "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    }


def test_a_cap_below_what_an_order_needs_is_what_it_needs() -> None:
    skeleton = {
        rank: [action._replace(kind="I") if action.kind == "B" else action for action in row]
        for rank, row in interleaved_1f1b_order(2, 2, 4).items()
        for row in [[action for action in row if action]]
    }
    order = fill_weights(skeleton, 0)
    assert validate_order(order, 4, 4) == []
    assert peak(order) == peak(interleaved_1f1b_order(2, 2, 4))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 6), (4, 8), (4, 3)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_is_torchs(
    p: int, m: int, v: int, fake_stages: Callable[..., list[Any]]
) -> None:
    ids = stage_ids_this_rank(0, p, v * p)
    theirs = schedule_order(
        resolve_schedule("interleaved_1f1b").cls(fake_stages(0, p, ids, v * p), m)
    )
    order = interleaved_1f1b_order(p, v, m)
    assert order == {rank: [action for action in row if action] for rank, row in theirs.items()}
    assert validate_order(order, v * p, m) == []


def test_interleaved_wants_whole_rounds() -> None:
    with pytest.raises(ValueError, match="multiple of 4, such as 8"):
        interleaved_1f1b_order(4, 2, 9)


@pytest.mark.parametrize("make", [zb_h1_order, zb_h2_order, v_half_order, v_min_order])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 7)])
def test_torch_takes_them(
    make: Callable[[int, int], Order],
    p: int,
    m: int,
    fake_stages: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    """torch fills in the communication of each, and keeps the order."""
    order = make(p, m)
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    for rank in range(p):
        ids = tuple(sorted({action.stage_index for action in order[rank] if action}))
        num_stages = len(ids) * p
        stages = fake_stages(rank, p, ids, num_stages)
        schedule = build_pipeline_schedule(str(path), None, 1, m, stages, None)
        assert schedule_order(schedule) == order
