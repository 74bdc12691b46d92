"""Lifetimes and slots: arithmetic, without torch."""

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from pp_bufferpool import Lifetime, Slots, assign_slots, max_overlap, recv_lifetimes
from pp_bufferpool.lifetimes import Runtime
from pp_schedule import named_order, resolve_schedule
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


def count(order: Order, rank: int, slack: int, runtime: Runtime = "multi") -> int:
    return len(assign_slots(recv_lifetimes(order, rank, runtime), slack).sizes)


@pytest.mark.parametrize("num_microbatches", [4, 8, 64])
@pytest.mark.parametrize("slack", [0, 2])
def test_1f1b_needs_no_more_than_the_stages_ahead(num_microbatches: int, slack: int) -> None:
    order = one_f_one_b_order(4, num_microbatches)
    most = [1, 4, 3, 1]  # activations of the stages ahead, and one gradient
    found = [count(order, rank, slack, "1f1b") for rank in range(4)]
    receives = [num_microbatches * sides for sides in (1, 2, 2, 1)]
    assert found == [min(n + slack, limit) for n, limit in zip(most, receives, strict=True)]
    sides = {(1, "forward"): 10, (1, "backward"): 11}
    apart = assign_slots(recv_lifetimes(order, 1, "1f1b"), slack, sides).sizes
    assert list(apart).count(10) == min(3 + slack, num_microbatches)
    assert list(apart).count(11) == min(1 + slack, num_microbatches)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda n: named("interleaved_1f1b", n), [5, 11, 9, 8]),
        (lambda n: named("v_schedule", n), [3, 11, 12, 7]),
    ],
)
def test_other_orders_need_what_a_real_run_was_seen_to_hold(
    make: Callable[[int], Order], wanted: list[int]
) -> None:
    for num_microbatches in (16, 64):
        order = make(num_microbatches)
        assert [count(order, rank, 0) for rank in range(4)] == wanted


def named(name: str, num_microbatches: int) -> Order:
    return named_order(resolve_schedule(name), 4, 8, num_microbatches)


def test_gpipe_needs_every_activation() -> None:
    # And a gradient; its loop holds each until the next is on its way.
    assert count(gpipe_order(4, 16), 2, 0, "gpipe") == 16 + 1
    assert count(gpipe_order(4, 16), 0, 0, "gpipe") == 2
    assert count(gpipe_order(4, 16), 0, 0, "1f1b") == 1


def test_the_lifetimes_of_a_small_order() -> None:
    # Stage 1 of 3 runs F0 F1 B0 F2 B1 B2, each after a receive.
    assert recv_lifetimes(one_f_one_b_order(3, 3), 1, "1f1b") == [
        Lifetime(1, 0, "forward", 0, 5),
        Lifetime(1, 1, "forward", 2, 9),
        Lifetime(1, 0, "backward", 4, 5),
        Lifetime(1, 2, "forward", 6, 11),
        Lifetime(1, 1, "backward", 8, 9),
        Lifetime(1, 2, "backward", 10, 11),
    ]


def test_split_backwards_hold_until_the_weight_half() -> None:
    order = {
        0: [Action(0, kind, 0) for kind in "FIW"],
        1: [Action(1, kind, 0) for kind in "FIW"],
    }
    # Programs without weights' steps: F SEND_F RECV_B I W, and RECV_F F I SEND_B W.
    backward, forward = recv_lifetimes(order, 0), recv_lifetimes(order, 1)
    assert [life[:3] for life in backward] == [(0, 0, "backward")]
    assert [life[:3] for life in forward] == [(1, 0, "forward")]
    assert backward[0].last - backward[0].first == 2
    assert forward[0].last - forward[0].first == 4


def test_between_stages_of_one_rank_nothing_is_received() -> None:
    v_shape = breadth_first_order({0: (0, 3), 1: (1, 2)}, 2)
    received = {(life.stage_index, life.direction) for life in recv_lifetimes(v_shape, 1)}
    assert received == {(1, "forward"), (2, "backward")}
    alone = breadth_first_order({0: (0, 1, 2)}, 2)
    assert recv_lifetimes(alone, 0) == []
    assert assign_slots([]) == Slots([], {})


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
        lifetimes = recv_lifetimes(order, rank, rng.choice(["multi", "1f1b", "gpipe"]))
        sizes = {owner[:1] + owner[2:3]: rng.choice([3, 5]) for owner in lifetimes}
        slots = assign_slots(lifetimes, slack, sizes)
        for size in (3, 5):
            mine = [x for x in lifetimes if sizes[x.stage_index, x.direction] == size]
            fewest = overlap_by_counting(mine)
            assert slots.sizes.count(size) == min(fewest + slack, len(mine))
            assert max_overlap(mine) == fewest
            used = {x: slots.slot_of[x.stage_index, x.direction, x.microbatch] for x in mine}
            assert all(slots.sizes[slot] == size for slot in used.values())
            for a in mine:
                for b in mine:
                    apart = a.last < b.first or b.last < a.first
                    assert a == b or apart or used[a] != used[b]
        assert max_overlap(lifetimes, sizes) <= sum(slots.sizes)


def test_a_slot_rests_for_slack_receives() -> None:
    slots = assign_slots(recv_lifetimes(one_f_one_b_order(2, 6), 1, "1f1b"), slack=2)
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
