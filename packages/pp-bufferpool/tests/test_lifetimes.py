"""Lifetimes and slots: arithmetic, without torch."""

import random
import subprocess
import sys
from collections.abc import Mapping

import pytest

from pp_bufferpool import Lifetime, Slots, assign_slots, max_overlap, recv_lifetimes
from pp_schedule.orders import (
    Action,
    Order,
    breadth_first_order,
    gpipe_order,
    one_f_one_b_order,
    required_before,
    validate_order,
)


def random_order(
    rng: random.Random, rank_of_stage: list[int], num_microbatches: int, split: bool
) -> Order:
    """A valid order drawn by running whatever can run, in random sequence."""
    num_stages = len(rank_of_stage)
    kinds = "FIW" if split else "FB"
    order: dict[int, list[Action | None]] = {rank: [] for rank in set(rank_of_stage)}
    todo = [Action(s, k, m) for s in range(num_stages) for k in kinds for m in range(num_microbatches)]  # fmt: skip
    done: set[Action] = set()
    while todo:
        ready = [a for a in todo if all(b in done for b in required_before(a, num_stages, split))]
        # The last stage takes the microbatches in order; torch numbers its losses so.
        losses = [a for a in todo if a[:2] == (num_stages - 1, "F")]
        ready = [a for a in ready if a not in losses[1:]]
        action = rng.choice(ready)
        todo.remove(action)
        done.add(action)
        actions = order[rank_of_stage[action.stage_index]]
        actions += [None] * rng.choice([0, 0, 0, 2])
        actions.append(action)
    return order


def overlap_by_counting(lifetimes: list[Lifetime]) -> int:
    last = max((life.last for life in lifetimes), default=-1)
    return max(
        (sum(life.first <= at <= life.last for life in lifetimes) for at in range(last + 1)),
        default=0,
    )


def counts(order: Order, rank: int, slack: int, copied: bool = False) -> Mapping[object, int]:
    return dict(assign_slots(recv_lifetimes(order, rank, copied), slack).counts)


@pytest.mark.parametrize("num_microbatches", [4, 8, 64])
@pytest.mark.parametrize("slack", [0, 2])
def test_1f1b_needs_no_more_than_the_stages_ahead(num_microbatches: int, slack: int) -> None:
    order = one_f_one_b_order(4, num_microbatches)
    for stage in range(4):
        found = counts(order, stage, slack)
        expected = {}
        if stage > 0:
            expected[stage, "forward"] = min(4 - stage + slack, num_microbatches)
        if stage < 3:
            expected[stage, "backward"] = min(1 + slack, num_microbatches)
        assert found == expected


@pytest.mark.parametrize("make", [one_f_one_b_order, gpipe_order])
def test_with_copies_one_slot_serves_all(make: object) -> None:
    order = make(4, 16)  # type: ignore[operator]
    assert counts(order, 1, 0, copied=True) == {(1, "forward"): 1, (1, "backward"): 1}


def test_gpipe_needs_every_microbatch() -> None:
    assert counts(gpipe_order(4, 16), 2, 2) == {(2, "forward"): 16, (2, "backward"): 3}


def test_the_lifetimes_of_a_small_order() -> None:
    # Stage 1 of 3 runs F0 F1 B0 F2 B1 B2.
    assert recv_lifetimes(one_f_one_b_order(3, 3), 1) == [
        Lifetime(1, 0, "forward", 0, 2),
        Lifetime(1, 1, "forward", 1, 4),
        Lifetime(1, 0, "backward", 2, 2),
        Lifetime(1, 2, "forward", 3, 5),
        Lifetime(1, 1, "backward", 4, 4),
        Lifetime(1, 2, "backward", 5, 5),
    ]


def test_split_backwards_hold_until_the_weight_half() -> None:
    order = {
        0: [Action(0, kind, 0) for kind in "FIW"],
        1: [Action(1, kind, 0) for kind in "FIW"],
    }
    assert recv_lifetimes(order, 0) == [Lifetime(0, 0, "backward", 1, 2)]
    assert recv_lifetimes(order, 1) == [Lifetime(1, 0, "forward", 0, 2)]


def test_between_stages_of_one_rank_nothing_is_received() -> None:
    v_shape = breadth_first_order({0: (0, 3), 1: (1, 2)}, 2)
    received = {(life.stage_index, life.direction) for life in recv_lifetimes(v_shape, 1)}
    assert received == {(1, "forward"), (2, "backward")}
    alone = breadth_first_order({0: (0, 1, 2)}, 2)
    assert recv_lifetimes(alone, 0) == []
    assert assign_slots([]) == Slots({}, {})


@pytest.mark.parametrize("seed", range(60))
def test_any_valid_order_gets_the_fewest_slots_that_never_clash(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 4)
    rank_of_stage = list(range(num_ranks)) + [rng.randrange(num_ranks) for _ in range(3)]
    rng.shuffle(rank_of_stage)
    split, num_microbatches, slack = rng.random() < 0.5, rng.randint(1, 6), rng.randint(0, 3)
    order = random_order(rng, rank_of_stage, num_microbatches, split)
    assert validate_order(order, len(rank_of_stage), num_microbatches) == []
    for rank in order:
        lifetimes = recv_lifetimes(order, rank, copied=rng.random() < 0.3)
        slots = assign_slots(lifetimes, slack)
        for (stage, direction), count in slots.counts.items():
            mine = [li for li in lifetimes if (li.stage_index, li.direction) == (stage, direction)]
            assert count == min(overlap_by_counting(mine) + slack, len(mine))
            assert max_overlap(mine) == overlap_by_counting(mine)
            used = {life: slots.slot_of[stage, direction, life.microbatch] for life in mine}
            assert set(used.values()) <= set(range(count))
            for a in mine:
                for b in mine:
                    apart = a.last < b.first or b.last < a.first
                    assert a == b or apart or used[a] != used[b]


def test_a_slot_rests_for_slack_receives() -> None:
    slots = assign_slots(recv_lifetimes(gpipe_order(2, 6), 1, copied=True), slack=2)
    assert [slots.slot_of[1, "forward", m] for m in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("slack", [-1, 1.0, True, "2", None])
def test_slack_must_be_an_int_of_at_least_0(slack: object) -> None:
    with pytest.raises(ValueError, match=r"slack=.*must be an int of at least 0"):
        assign_slots([], slack)  # type: ignore[arg-type]


def test_the_arithmetic_imports_no_torch() -> None:
    code = (
        "import sys, pp_bufferpool; pp_bufferpool.recv_lifetimes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
