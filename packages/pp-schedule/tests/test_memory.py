from collections.abc import Callable
from typing import Any

import pytest

from pp_schedule import (
    Action,
    StageCosts,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)
from pp_schedule.orders import gpipe_order, one_f_one_b_order


def row(*actions: str) -> list[Action]:
    return [Action(int(text[0]), text[1], int(text[2:])) for text in actions]


def test_a_whole_backward_by_hand() -> None:
    costs = StageCosts(1.0, 1.0, 1.0, activation_bytes=5, parameter_bytes=100)
    timeline = simulate({0: row("0F0", "0F1", "0B0", "0B1")}, costs)
    assert timeline.memory(0) == [(0.0, 105), (1.0, 110), (4.0, 105), (6.0, 100)]
    assert timeline.peak_memory == (110,)


def test_a_split_backward_frees_in_two_steps_but_for_stage_0() -> None:
    order = {0: row("0F0", "0I0", "0W0"), 1: row("1F0", "1I0", "1W0")}
    costs = StageCosts(1.0, 1.0, 1.0, activation_bytes=[4, 8], kept_for_weight=0.25)
    timeline = simulate(order, costs)
    assert timeline.memory(1) == [(0.0, 0), (1.0, 8), (3.0, 2), (4.0, 0)]
    assert timeline.memory(0) == [(0.0, 4), (5.0, 0)]  # 0I0 at 3 is no work and frees nothing


def test_a_weight_half_may_need_more_than_the_forward_left() -> None:
    order = {0: row("0F0", "0B0"), 1: row("1F0", "1I0", "1W0")}
    timeline = simulate(order, StageCosts(activation_bytes=10, kept_for_weight=1.5))
    assert timeline.peak_memory == (10, 15)


def test_torch_frees_with_the_weight_half() -> None:
    order = {0: row("0F0", "0B0"), 1: row("1F0", "1I0", "1W0")}
    timeline = simulate(order, StageCosts(1.0, 1.0, 1.0, activation_bytes=8))
    assert timeline.memory(1) == [(0.0, 0), (1.0, 8), (4.0, 0)]


def test_receives_live_from_their_transfer_to_their_use() -> None:
    costs = StageCosts(1.0, 1.0, 1.0, boundary_bytes=6, bandwidth=3.0)
    timeline = simulate(gpipe_order(2, 2), costs)
    # Outputs leave rank 0 at 1 and 3 and are used at 3 and 5.
    assert timeline.memory(1) == [(0.0, 0), (1.0, 6), (5.0, 0)]
    # Gradients leave rank 1 at 8 and 10, rank 0's backwards end at 12 and 14.
    assert [(s.start, s.end) for s in timeline.spans if s.action.kind == "B" and s.rank == 0] == [
        (10.0, 12.0),
        (12.0, 14.0),
    ]
    assert timeline.memory(0)[1:] == [(8.0, 6), (10.0, 12), (12.0, 6), (14.0, 0)]


def test_a_pool_of_buffers_is_there_all_the_step() -> None:
    costs = StageCosts(boundary_bytes=6, bandwidth=3.0, buffer_bytes=[0, 24], parameter_bytes=1)
    timeline = simulate(gpipe_order(2, 2), costs)
    assert timeline.memory(0) == [(0.0, 1)]
    assert timeline.memory(1) == [(0.0, 25)]


def test_parameters_of_all_stages_of_a_rank() -> None:
    ids = {rank: stage_ids_this_rank(rank, 2, 4) for rank in range(2)}
    order = {r: row(*(f"{s}F0" for s in ids[r]), *(f"{s}B0" for s in ids[r][::-1])) for r in ids}
    timeline = simulate(order, StageCosts(parameter_bytes=[1, 2, 4, 8]))
    assert timeline.peak_memory == (5, 10)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_peaks_of_torchs_schedules(p: int, m: int, fake_stages: Callable[..., list[Any]]) -> None:
    """The most activations of each rank, in microbatches of all of a rank's stages."""
    wanted: dict[tuple[str, int], list[float]] = {
        ("looped_bfs", 2): [m] * p,
        ("interleaved_1f1b", 2): [p + (p - 1) / 2 - rank for rank in range(p)],
        ("interleaved_1f1b", 3): [p + (p - 1) / 3 - 2 * rank / 3 for rank in range(p)],
        ("zero_bubble", 1): [p] * p,
        ("zero_bubble", 2): [p] * p,
        ("zbv", 2): [p] * p,
        ("dualpipev", 2): [p + 0.5] * p,
    }
    for (name, v), peaks in wanted.items():
        spec = resolve_schedule(name)
        ids = stage_ids_this_rank(0, p, v * p, spec.style)
        order = schedule_order(spec.cls(fake_stages(0, p, ids, v * p), m))
        timeline = simulate(order, StageCosts(activation_bytes=1 / v))
        if name in ("zbv", "dualpipev") and m < 2 * p:
            assert max(timeline.peak_memory) <= max(peaks)
        else:
            assert timeline.peak_memory == pytest.approx(peaks), name


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 8), (4, 2), (4, 8)])
def test_peaks_of_gpipe_and_1f1b(p: int, m: int) -> None:
    costs = StageCosts(activation_bytes=1)
    assert simulate(gpipe_order(p, m), costs).peak_memory == (m,) * p
    peaks = tuple(min(m, p - rank) for rank in range(p))
    assert simulate(one_f_one_b_order(p, m), costs).peak_memory == peaks


def test_memory_returns_to_what_stays() -> None:
    costs = StageCosts(activation_bytes=3, boundary_bytes=2, latency=0.1, parameter_bytes=7)
    timeline = simulate(one_f_one_b_order(4, 6), costs)
    for rank in range(4):
        times = [time for time, _ in timeline.memory(rank)]
        assert times[0] == 0.0
        assert times == sorted(set(times))
        assert timeline.memory(rank)[-1] == (times[-1], 7)
        assert max(size for _, size in timeline.memory(rank)) == timeline.peak_memory[rank]


def test_costs_of_stages_name_all_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="no costs of stages") as error:
        StageCosts(
            forward=[1.0, -2.0], backward_input=[1.0] * 3, latency=float("nan"), bandwidth=0.0
        )
    for part in ("forward -2.0", "latency nan", "bandwidth 0.0", "forward 2, backward_input 3"):
        assert part in str(error.value)
