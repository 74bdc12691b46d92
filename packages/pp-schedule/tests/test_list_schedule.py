from itertools import product
from random import Random

import pytest

from pp_schedule import (
    Order,
    StageCosts,
    named_order,
    simulate,
    stage_ids_this_rank,
    step_time,
    validate_order,
    zb_h1_order,
)
from pp_schedule.planner.bound import lower_bound
from pp_schedule.planner.list_schedule import Preference, Rules, list_schedule, refit
from pp_schedule.planner.polish import activation_peaks, polish

PREFERENCES: tuple[Preference, ...] = ("other", "forward", "backward")
PLACES = [("loop", 1), ("loop", 2), ("v", 2), ("loop", 3)]


def uneven(num_stages: int, seed: int) -> StageCosts:
    """Stages that have nothing in common, with messages and bytes."""
    random = Random(seed)
    times = [[random.uniform(0.5, 2.0) for _ in range(num_stages)] for _ in range(3)]
    return StageCosts(
        *times,
        activation_bytes=[random.uniform(1.0, 3.0) for _ in range(num_stages)],
        kept_for_weight=[random.choice((0.4, 1.0)) for _ in range(num_stages)],
        boundary_bytes=0.1,
        bandwidth=1.0,
        latency=0.05,
        overhead=0.02,
        split_factor=1.1,
    )


def places(style: str, per_rank: int, pp_size: int) -> dict[int, tuple[int, ...]]:
    return {
        rank: stage_ids_this_rank(rank, pp_size, per_rank * pp_size, style)
        for rank in range(pp_size)
    }


def needs(stage_ids: dict[int, tuple[int, ...]], costs: StageCosts) -> list[float]:
    held = costs.per_stage("activation_bytes", sum(map(len, stage_ids.values())))
    return [sum(held[stage] for stage in stage_ids[rank]) for rank in sorted(stage_ids)]


@pytest.mark.parametrize(("style", "per_rank"), PLACES)
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_every_order_runs_within_its_memory(style: str, per_rank: int, pp_size: int) -> None:
    stage_ids = places(style, per_rank, pp_size)
    num_stages, m = per_rank * pp_size, 7
    costs = uneven(num_stages, seed=pp_size)
    for prefer, deep, patience, split, times in product(
        PREFERENCES, (True, False), (0.0, 0.7), (True, False), (1.0, 1.5, 3.0, 100.0)
    ):
        limits = [times * need for need in needs(stage_ids, costs)]
        rules = Rules(prefer, deep, patience, split)
        order = list_schedule(stage_ids, costs, m, limits, rules)
        assert order is not None
        assert validate_order(order, num_stages, m) == []
        for peak, limit in zip(activation_peaks(order, costs), limits, strict=True):
            assert peak <= limit * (1 + 1e-6)
        assert step_time(order, costs) >= lower_bound(stage_ids, costs, m) * (1 - 1e-9)
        kinds = {action.kind for row in order.values() for action in row if action}
        assert ("W" in kinds) == (split and num_stages > 1)


def test_no_room_for_one_microbatch_is_no_order() -> None:
    stage_ids = places("v", 2, 3)
    costs = uneven(6, seed=1)
    limits = [0.99 * need for need in needs(stage_ids, costs)]
    assert list_schedule(stage_ids, costs, 4, limits, Rules()) is None
    assert refit(named_order("zbv", 3, 6, 4), costs, limits) is None


@pytest.mark.parametrize("pp_size", [2, 4, 8])
def test_in_1f1b_memory_it_is_as_fast_as_zb_h1(pp_size: int) -> None:
    costs = StageCosts(1.0, 1.0, 1.0, activation_bytes=1.0)
    stage_ids, m = places("loop", 1, pp_size), 4 * pp_size
    order = list_schedule(stage_ids, costs, m, [pp_size] * pp_size, Rules())
    assert order is not None
    assert step_time(order, costs) <= step_time(zb_h1_order(pp_size, m), costs)


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "zero_bubble", "interleaved_1f1b"])
def test_a_refitted_order_keeps_its_forwards_and_its_limits(name: str) -> None:
    order = named_order(name, 4, 8, 8)
    costs = uneven(8, seed=3)
    room = activation_peaks(order, costs)
    refitted = refit(order, costs, room)
    assert refitted is not None
    assert validate_order(refitted, 8, 8) == []
    for peak, limit in zip(activation_peaks(refitted, costs), room, strict=True):
        assert peak <= limit * (1 + 1e-6)

    def forwards(order: Order) -> list[list[str]]:
        return [[str(a) for a in row if a and a.kind == "F"] for row in order.values()]

    assert forwards(refitted) == forwards(order)


@pytest.mark.parametrize("seed", range(4))
def test_weight_halves_move_to_where_the_costs_have_gaps(seed: int) -> None:
    costs, order = uneven(8, seed), named_order("zbv", 4, 8, 8)
    refitted = refit(order, costs, [1e9] * 4)
    assert refitted is not None
    assert step_time(refitted, costs) < step_time(order, costs)


@pytest.mark.parametrize(("name", "num_stages"), [("1f1b", 4), ("zbv", 8), ("dualpipev", 8)])
def test_polishing_makes_no_order_worse(name: str, num_stages: int) -> None:
    order, costs = named_order(name, 4, num_stages, 8), uneven(num_stages, seed=5)
    room = activation_peaks(order, costs)
    polished = polish(order, costs, room, 400)
    assert validate_order(polished, num_stages, 8) == []
    assert step_time(polished, costs) <= step_time(order, costs)
    if name != "1f1b":  # which is the best there is of whole backwards
        assert step_time(polished, costs) < step_time(order, costs)
    for peak, limit in zip(activation_peaks(polished, costs), room, strict=True):
        assert peak <= limit * (1 + 1e-6)
    assert polish(order, costs, room, 400) == polished
    assert name == "1f1b" or polish(order, costs, room, 400, seed=1) != polished


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_activation_peaks_are_those_of_the_simulator(name: str) -> None:
    per_rank = 1 if name in ("gpipe", "1f1b") else 2
    order = named_order(name, 4, 4 * per_rank, 8)
    costs = StageCosts(1, 1, 1, [1.0 + s / 7 for s in range(4 * per_rank)], kept_for_weight=0.25)
    assert activation_peaks(order, costs) == pytest.approx(simulate(order, costs).peak_memory)


@pytest.mark.parametrize(("style", "per_rank"), PLACES)
def test_no_order_beats_the_bound(style: str, per_rank: int) -> None:
    names = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]
    for pp_size, seed in product((1, 2, 4), range(2)):
        num_stages, m = per_rank * pp_size, 2 * pp_size
        costs, stage_ids = uneven(num_stages, seed), places(style, per_rank, pp_size)
        for name in names:
            try:
                order = named_order(name, pp_size, num_stages, m)
            except ValueError:
                continue
            if {a.stage_index for a in order[0] if a} == set(stage_ids[0]):
                bound = lower_bound(stage_ids, costs, m)
                assert step_time(order, costs) >= bound * (1 - 1e-9)


def test_the_bound_is_met_where_it_can_be() -> None:
    costs = StageCosts(1.0, 1.0, 1.0)
    stage_ids = places("loop", 1, 4)
    # ZB-H1 idles (p-1)(F+I-W) and no more.
    assert lower_bound(stage_ids, costs, 8) == 27
    assert step_time(zb_h1_order(4, 8), costs) == 27
    # One microbatch goes there and back; stage 0's backward is whole.
    assert lower_bound(stage_ids, costs, 1) == 4 + 3 + 2
