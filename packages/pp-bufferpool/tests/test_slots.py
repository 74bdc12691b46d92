"""Memory is lent again only when nobody holds it."""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pp_bufferpool.lifetimes import Lifetime
from pp_bufferpool.shelf import Shelf
from pp_bufferpool.slots import Layout, Meter, Slot

CPU = torch.device("cpu")


def layout(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
    return Layout([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes])


def lend(slot: Slot, given: Layout | None = None) -> torch.Tensor:
    (tensor,) = slot.lend(given or layout((2, 3)))
    assert tensor is not None
    return tensor


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:],
    "a detached alias": lambda x: x.detach(),
    "a numpy array": lambda x: x.numpy(),
    "its storage": lambda x: x.untyped_storage(),
    "a graph": lambda x: (x.requires_grad_() ** 2).sum(),
    "a leaf's graph that saved nothing": lambda x: x.requires_grad_().sum(),
    "a hook that was given it as a gradient": lambda x: kept_by_a_hook(x),
    "a dict in a list": lambda x: [{"hidden": x}],
}


def kept_by_a_hook(x: torch.Tensor) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    output = torch.zeros_like(x, requires_grad=True) + 0
    output.register_hook(kept.append)
    output.backward(x)
    return kept


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_holds_is_not_lent(holder: str) -> None:
    slot = Slot(CPU, Meter())
    assert slot.is_free
    tensor = lend(slot).fill_(1)
    address = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    assert not slot.is_free
    slot.poison()
    other = lend(slot).fill_(2)
    assert other.data_ptr() != address
    del held, other
    gc.collect()
    assert slot.is_free


def test_memory_that_nobody_holds_is_lent_again() -> None:
    slot, meter = Slot(CPU, Meter()), None
    tensor = lend(slot)
    address = tensor.data_ptr()
    y = (tensor.requires_grad_() ** 2).sum()
    y.backward()
    y.detach_()
    del tensor
    assert slot.is_free
    meter = slot.meter
    again = lend(slot)
    assert again.data_ptr() == address
    assert again.is_leaf
    assert not again.requires_grad
    assert meter.allocations == 1


def test_poison_is_nan_in_every_float() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        slot = Slot(CPU, Meter())
        slot.lend(layout((4,), dtype=dtype))
        slot.poison()
        tensor = lend(slot, layout((4,), dtype=dtype))
        assert tensor.to(torch.float32).isnan().all()


def test_tensors_of_one_receive_lie_apart_and_as_they_were_described() -> None:
    examples = [
        torch.empty((3, 5), dtype=torch.bfloat16, device="meta").t(),
        None,
        torch.empty((7,), dtype=torch.int64, device="meta"),
    ]
    given = Layout(examples)
    assert given.num_tensors == 2
    first, nothing, second = Slot(CPU, Meter()).lend(given)
    assert first is not None
    assert nothing is None
    assert second is not None
    assert (first.shape, first.stride(), first.dtype) == ((5, 3), (1, 5), torch.bfloat16)
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_slot_keeps_memory_that_is_large_enough() -> None:
    slot = Slot(CPU, Meter())
    large = lend(slot, layout((1000,))).data_ptr()
    assert lend(slot, layout((10,))).data_ptr() == large
    assert lend(slot, layout((1000,))).data_ptr() == large
    lend(slot, layout((2000,)))
    assert slot.meter.allocations == 2
    assert slot.nbytes == 8000


def test_memory_of_an_evaluation_serves_training() -> None:
    slot = Slot(CPU, Meter())
    with torch.inference_mode():
        lend(slot)
    tensor = lend(slot)
    assert not tensor.is_inference()
    (tensor.requires_grad_() ** 2).sum().backward()


def shelf(slack: int = 0) -> Shelf:
    """Three receives in turn on one stage, and one on another, of another size."""
    lives = [Lifetime(1, m, "forward", 2 * m, 2 * m + 1) for m in range(3)]
    made = Shelf([*lives, Lifetime(2, 0, "backward", 0, 9)], slack, CPU)
    made.set_layout(1, "forward", layout((2, 3)))
    return made


def test_what_is_not_known_yet_is_planned_when_it_is() -> None:
    pool = shelf()
    pool.lend((1, "forward", 0))
    assert len(pool.slots) == 1
    pool.set_layout(2, "backward", layout((1000,)))
    pool.lend((1, "forward", 1))
    pool.lend((2, "backward", 0))
    assert sorted(slot.nbytes for slot in pool.slots) == [24, 4000]


def test_receives_outside_the_plan_find_a_slot_or_get_memory_of_their_own() -> None:
    pool = shelf()
    first = pool.lend((1, "forward", 0))
    second = pool.lend((1, "forward", 1))  # too early: an order that was not planned
    third = pool.lend((1, "forward", 7))  # a microbatch that the plan does not know
    addresses = {t.data_ptr() for t in (*first, *second, *third) if t is not None}
    assert len(addresses) == 3
    assert pool.meter.fallbacks == 2
    del first, second, third
    free = pool.lend((1, "forward", 7))
    assert pool.meter.fallbacks == 2
    assert pool.meter.peak_live == 3
    del free
    assert pool.meter.live == 0


def test_a_large_slot_is_left_to_large_receives() -> None:
    pool = shelf()
    pool.set_layout(2, "backward", layout((1000,)))
    kept = pool.lend((1, "forward", 0))
    for _ in range(4):  # the small slot is taken for good, once
        pool.lend((2, "backward", 0))
        pool.lend((1, "forward", 1))
        pool.lend((1, "forward", 2))
    assert pool.meter.allocations == 2 + pool.meter.fallbacks
    assert sum(slot.nbytes >= 4000 for slot in pool.slots) == 1
    del kept


def test_clearing_frees_all_memory() -> None:
    pool = shelf()
    pool.lend((1, "forward", 0))
    slots = [weakref.ref(slot) for slot in pool.slots]
    pool.clear()
    assert all(reference() is None for reference in slots)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_holds_what_sees_its_own_receive(seed: int) -> None:
    """Receives in random order, read late by random holders, with free slots poisoned."""
    rng = random.Random(seed)
    lives = [
        Lifetime(stage, m, "forward", at := 10 * m + stage, at + rng.randint(1, 30))
        for m in range(12)
        for stage in (1, 2)
    ]
    pool = Shelf(lives, rng.randint(0, 2), CPU)
    pool.poison = True
    for stage in (1, 2):
        pool.set_layout(stage, "forward", layout((3, stage)))
    held: list[tuple[int, float, Any]] = []
    events = sorted(lives, key=lambda life: life.first)
    rng.shuffle(events)  # not the order that was planned
    for number, life in enumerate(events):
        (tensor,) = pool.lend((life.stage_index, "forward", life.microbatch))
        assert tensor is not None
        tensor.fill_(number)
        holder = HOLDERS[rng.choice(["itself", "a view", "a numpy array"])](tensor)
        held.append((number + rng.randint(0, 6), number, holder))
        del tensor, holder
        for until, value, kept in held:
            assert (kept == value).all(), until
        held = [entry for entry in held if entry[0] > number]


def test_nothing_to_receive_takes_no_slot() -> None:
    pool = shelf()
    pool.set_layout(1, "forward", Layout([None]))
    assert pool.lend((1, "forward", 0)) == [None]
    assert pool.meter.allocations == 0
