import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pp_schedule import (
    Action,
    Costs,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)
from pp_schedule.orders import gpipe_order, one_f_one_b_order


@pytest.mark.parametrize("make", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8, 13])
@pytest.mark.parametrize("costs", [None, Costs(2.0, 3.0, 0.5)])
def test_bubble_of_gpipe_and_1f1b(
    make: Callable[..., Any], num_stages: int, num_microbatches: int, costs: Costs | None
) -> None:
    p, m = num_stages, num_microbatches
    timeline = simulate(make(p, m), costs)
    per_microbatch = 3.0 if costs is None else 5.5
    assert timeline.makespan == pytest.approx((m + p - 1) * per_microbatch)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_bubble_of_interleaved_1f1b(
    pp_size: int, v: int, rounds: int, fake_stages: Callable[..., list[Any]]
) -> None:
    ids = stage_ids_this_rank(0, pp_size, v * pp_size)
    stages = fake_stages(0, pp_size, ids, v * pp_size)
    m = rounds * pp_size
    order = schedule_order(resolve_schedule("interleaved_1f1b").cls(stages, m))
    # A whole rank's forward takes 1 and its backward 2, divided over its v stages.
    timeline = simulate(order, Costs(1.0 / v, 1.0 / v, 1.0 / v))
    idle = timeline.makespan - m * 3.0
    assert idle == pytest.approx((pp_size - 1) * 3.0 / v)
    assert timeline.bubbles == pytest.approx([idle / timeline.makespan] * pp_size)


def test_zero_bubble_idles_less_than_1f1b(fake_stages: Callable[..., list[Any]]) -> None:
    bubbles = {}
    for name in ("interleaved_1f1b", "zero_bubble", "zbv"):
        spec = resolve_schedule(name)
        stages = fake_stages(0, 4, stage_ids_this_rank(0, 4, 8, spec.style), 8)
        bubbles[name] = simulate(schedule_order(spec.cls(stages, 8))).bubble_fraction
    assert bubbles["zero_bubble"] < bubbles["interleaved_1f1b"] < 3 / 11
    assert bubbles["zbv"] < bubbles["interleaved_1f1b"]


def test_spans_by_hand() -> None:
    timeline = simulate(one_f_one_b_order(2, 2), Costs([1.0, 4.0], 2.0, [3.0, 1.0]))
    spans = {str(span.action): (span.rank, span.start, span.end) for span in timeline.spans}
    assert spans == {
        "0F0": (0, 0.0, 1.0),
        "0F1": (0, 1.0, 2.0),
        "1F0": (1, 1.0, 5.0),
        "1B0": (1, 5.0, 8.0),
        "1F1": (1, 8.0, 12.0),
        "0B0": (0, 8.0, 13.0),
        "1B1": (1, 12.0, 15.0),
        "0B1": (0, 15.0, 20.0),
    }
    assert timeline.makespan == 20.0
    assert timeline.bubbles == pytest.approx([1 - 12 / 20, 1 - 14 / 20])


def test_the_first_stage_has_no_input_to_differentiate_for() -> None:
    costs = Costs(1.0, 2.0, 4.0)
    assert [costs.of(Action(0, kind, 0)) for kind in "FBIW"] == [1.0, 6.0, 0.0, 6.0]
    assert [costs.of(Action(1, kind, 0)) for kind in "FBIW"] == [1.0, 6.0, 2.0, 4.0]


def test_spans_of_a_rank_do_not_overlap_and_every_action_has_one() -> None:
    order = one_f_one_b_order(4, 6)
    timeline = simulate(order, Costs([1.0, 2.0, 0.5, 3.0]))
    for rank, row in order.items():
        spans = [span for span in timeline.spans if span.rank == rank]
        assert [span.action for span in spans] == row
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start


def test_idle_steps_take_no_time() -> None:
    order = one_f_one_b_order(3, 4)
    idle = {rank: [x for action in row for x in (None, action)] for rank, row in order.items()}
    assert simulate(idle) == simulate(order)


def test_a_deadlock_is_an_error() -> None:
    order = {
        0: [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
        1: [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
    }
    with pytest.raises(ValueError, match="0B0 on rank 0, 1F1 on rank 1"):
        simulate(order)
