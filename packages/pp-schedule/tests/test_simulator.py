import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from pp_schedule import (
    Action,
    Order,
    StageCosts,
    Timeline,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)
from pp_schedule.orders import gpipe_order, one_f_one_b_order, required_before
from pp_schedule.v_orders import v_half_order
from pp_schedule.zero_bubble_orders import zb_h1_order


@pytest.mark.parametrize("make", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8, 13])
@pytest.mark.parametrize("costs", [None, StageCosts(2.0, 3.0, 0.5)])
def test_bubble_of_gpipe_and_1f1b(
    make: Callable[..., Any], num_stages: int, num_microbatches: int, costs: StageCosts | None
) -> None:
    p, m = num_stages, num_microbatches
    timeline = simulate(make(p, m), costs)
    per_microbatch = 3.0 if costs is None else 5.5
    assert timeline.makespan == pytest.approx((m + p - 1) * per_microbatch)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p)


TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.7)]


def torch_order(name: str, pp_size: int, v: int, m: int, fake_stages: Callable[..., Any]) -> Order:
    spec = resolve_schedule(name)
    ids = stage_ids_this_rank(0, pp_size, v * pp_size, spec.style)
    return schedule_order(spec.cls(fake_stages(0, pp_size, ids, v * pp_size), m))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_bubble_of_interleaved_1f1b(
    p: int, v: int, rounds: int, fake_stages: Callable[..., list[Any]]
) -> None:
    m = rounds * p
    order = torch_order("interleaved_1f1b", p, v, m, fake_stages)
    for f, i, w in TIMES:  # of a whole rank, divided over its v stages
        timeline = simulate(order, StageCosts(f / v, i / v, w / v))
        idle = timeline.makespan - m * (f + i + w)
        assert idle == pytest.approx((p - 1) * (f + i + w) / v)
        assert timeline.bubbles == pytest.approx([(p - 1) / (v * m + p - 1)] * p)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_idle_time_of_zero_bubble(
    p: int, rounds: int, v: int, fake_stages: Callable[..., list[Any]]
) -> None:
    m = rounds * p
    for name, less in (("zero_bubble", -1), ("looped_bfs", 1)):
        order = torch_order(name, p, v, m, fake_stages)
        for f, i, w in TIMES:
            timeline = simulate(order, StageCosts(f / v, i / v, w / v))
            idle = (p - 1) * (f + i + less * w) / v
            assert timeline.makespan - m * (f + i + w) == pytest.approx(idle), name


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_idle_time_of_zb_h1_and_zbv(p: int, fake_stages: Callable[..., list[Any]]) -> None:
    for m in (p, p + 1, 2 * p - 1, 2 * p, 3 * p, 4 * p):
        for f, i, w in TIMES:
            timeline = simulate(zb_h1_order(p, m), StageCosts(f, i, w))
            assert timeline.makespan - m * (f + i + w) == pytest.approx((p - 1) * (f + i - w))
        if m >= 2 * p - 1:  # with fewer it idles longer
            timeline = simulate(torch_order("zbv", p, 2, m, fake_stages), StageCosts(0.5, 0.5, 0.5))
            assert timeline.makespan - m * 3.0 == pytest.approx((p - 1) / 2)


def test_zero_bubble_idles_less_than_1f1b(fake_stages: Callable[..., list[Any]]) -> None:
    bubbles = {}
    for name in ("interleaved_1f1b", "zero_bubble", "zbv"):
        spec = resolve_schedule(name)
        stages = fake_stages(0, 4, stage_ids_this_rank(0, 4, 8, spec.style), 8)
        bubbles[name] = simulate(schedule_order(spec.cls(stages, 8))).bubble_fraction
    assert bubbles["zero_bubble"] < bubbles["interleaved_1f1b"] < 3 / 11
    assert bubbles["zbv"] < bubbles["interleaved_1f1b"]


def test_spans_by_hand() -> None:
    timeline = simulate(one_f_one_b_order(2, 2), StageCosts([1.0, 4.0], 2.0, [3.0, 1.0]))
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
    costs = StageCosts(1.0, 2.0, 4.0)
    assert [costs.of(Action(0, kind, 0)) for kind in "FBIW"] == [1.0, 6.0, 0.0, 6.0]
    assert [costs.of(Action(1, kind, 0)) for kind in "FBIW"] == [1.0, 6.0, 2.0, 4.0]


def test_spans_of_a_rank_do_not_overlap_and_every_action_has_one() -> None:
    order = one_f_one_b_order(4, 6)
    timeline = simulate(order, StageCosts([1.0, 2.0, 0.5, 3.0]))
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


def test_an_order_without_actions_is_an_error() -> None:
    with pytest.raises(ValueError, match="no action"):
        simulate({0: [None], 1: []})


def test_costs_of_another_number_of_stages_are_an_error() -> None:
    with pytest.raises(ValueError, match="forward is given for 3 stages, but there are 4"):
        simulate(gpipe_order(4, 4), StageCosts([1.0, 1.0, 1.0]))


def test_zero_bubble_counts_each_rank_from_its_own_start() -> None:
    timeline = simulate(one_f_one_b_order(4, 8))
    assert timeline.rank_spans == pytest.approx([33.0, 30.0, 27.0, 24.0])
    assert timeline.makespan == 33.0


# --- messages


def test_messages_by_hand() -> None:
    """A message of 6 bytes keeps the link busy for 2 and needs 0.5 more to arrive."""
    costs = StageCosts(1.0, 2.0, 1.0, boundary_bytes=6, bandwidth=3.0, latency=0.5)
    timeline = simulate(gpipe_order(2, 2), costs)
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert spans == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),  # while 0F0's output travels
        "1F0": (3.5, 4.5),
        "1F1": (5.5, 6.5),  # its input left at 3, when the link was free
        "1B0": (6.5, 9.5),
        "1B1": (9.5, 12.5),
        "0B0": (12.0, 15.0),
        "0B1": (15.0, 18.0),
    }
    transfers = {str(t.action): (t.source, t.target, t.start, t.end) for t in timeline.transfers}
    assert transfers == {
        "0F0": (0, 1, 1.0, 3.5),
        "0F1": (0, 1, 3.0, 5.5),
        "1B0": (1, 0, 9.5, 12.0),
        "1B1": (1, 0, 12.5, 15.0),
    }


def test_each_link_has_its_own_speed() -> None:
    costs = StageCosts(1.0, 1.0, 1.0, boundary_bytes=[4, 8, 0], bandwidth=[4.0, 2.0, 1.0])
    timeline = simulate(one_f_one_b_order(3, 1), costs)
    arrivals = {str(t.action): t.end - t.start for t in timeline.transfers}
    assert arrivals == {"0F0": 1.0, "1F0": 4.0, "2B0": 4.0, "1B0": 1.0}
    assert timeline.makespan == 3 * 3 + 2 * (1 + 4)


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    ids = {rank: stage_ids_this_rank(rank, 2, 4, "v") for rank in range(2)}
    order = v_half_order(2, 3)
    timeline = simulate(order, StageCosts(latency=1.0))
    assert len(timeline.transfers) == 3 * 2 * 2  # not from stage 1 to stage 2, both on rank 1
    for transfer in timeline.transfers:
        assert transfer.action.stage_index in ids[transfer.source]
        assert {transfer.source, transfer.target} == {0, 1}


def random_case(random: Random) -> tuple[Order, StageCosts]:
    p, m = random.randint(1, 5), random.randint(1, 9)
    make = random.choice([gpipe_order, one_f_one_b_order, zb_h1_order, v_half_order])
    order = make(p, m)
    num_stages = 2 * p if make is v_half_order else p

    def some(high: float) -> list[float]:
        return [random.uniform(0.1, high) for _ in range(num_stages)]

    costs = StageCosts(
        some(3.0),
        some(3.0),
        some(3.0),
        activation_bytes=some(5.0),
        kept_for_weight=random.choice([0.0, 0.5, 1.0, 1.2]),
        boundary_bytes=some(2.0),
        latency=random.choice([0.0, 0.3]),
        bandwidth=some(4.0),
    )
    return order, costs


def longest_chain(order: Order, costs: StageCosts, num_stages: int) -> float:
    """The longest chain of actions that need each other, whoever runs them; messages are free."""
    actions = {action for row in order.values() for action in row if action}

    @cache
    def end(action: Action) -> float:
        split = Action(action.stage_index + 1, "I", action.microbatch) in actions
        before = required_before(action, num_stages, split)
        return max((end(b) for b in before), default=0.0) + costs.of(action)

    return max(map(end, sorted(actions)))


@pytest.mark.parametrize("case", range(60))
def test_what_holds_of_every_timeline(case: int) -> None:
    order, costs = random_case(Random(case))
    timeline = simulate(order, costs)
    num_stages = 1 + max(span.action.stage_index for span in timeline.spans)
    busiest = max(sum(costs.of(a) for a in row if a) for row in order.values())
    assert timeline.makespan >= busiest - 1e-9
    assert timeline.makespan >= longest_chain(order, costs, num_stages) - 1e-9
    check_needs(timeline, num_stages)
    check_links(timeline, costs, num_stages)


def check_needs(timeline: Timeline, num_stages: int) -> None:
    """No action starts before what it needs has ended, and has arrived if it is of another rank."""
    ends = {span.action: span.end for span in timeline.spans}
    rank_of = {span.action: span.rank for span in timeline.spans}
    arrivals = {transfer.action: transfer.end for transfer in timeline.transfers}
    for span in timeline.spans:
        split = Action(span.action.stage_index + 1, "I", span.action.microbatch) in ends
        for needed in required_before(span.action, num_stages, split):
            there = ends[needed] if rank_of[needed] == span.rank else arrivals[needed]
            assert span.start >= there


def check_links(timeline: Timeline, costs: StageCosts, num_stages: int) -> None:
    """One message at a time per pair of ranks and direction, in the order they were made."""
    ends = {span.action: span.end for span in timeline.spans}
    latency = costs.per_stage("latency", num_stages)[0]
    for link in {(t.source, t.target) for t in timeline.transfers}:
        used = [t for t in timeline.transfers if (t.source, t.target) == link]
        for transfer in used:
            assert transfer.start >= ends[transfer.action]
        for before, after in itertools.pairwise(used):
            assert after.start >= before.end - latency - 1e-9
            assert ends[after.action] >= ends[before.action]


@pytest.mark.parametrize("case", range(30))
def test_slower_messages_never_end_sooner(case: int) -> None:
    order, costs = random_case(Random(case))
    spans = [simulate(order, replace(costs, latency=x)).makespan for x in (0.0, 0.1, 0.5, 2.0)]
    assert spans == sorted(spans)
    slow, fast = replace(costs, bandwidth=0.5), replace(costs, bandwidth=5.0)
    assert simulate(order, slow).makespan >= simulate(order, fast).makespan


def test_twice_the_microbatches_are_twice_the_work(work_of: Callable[..., Any]) -> None:
    costs = StageCosts(activation_bytes=1.0, boundary_bytes=1.0, bandwidth=100.0, latency=0.01)
    once, twice = (work_of(simulate, v_half_order(4, m), costs)[0] for m in (64, 128))
    assert twice < 2.2 * once


def test_a_large_order() -> None:
    order = v_half_order(64, 256)
    assert sum(map(len, order.values())) == 98_304 == 64 * 256 * 2 * 3
    costs = StageCosts(activation_bytes=1.0, boundary_bytes=1.0, bandwidth=100.0, latency=0.01)
    timeline = simulate(order, costs)
    assert len(timeline.spans) == 98_304
    assert timeline.makespan > max(
        sum(span.end - span.start for span in timeline.spans if span.rank == rank) for rank in order
    )
