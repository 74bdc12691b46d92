"""All slots of one rank, and which of them a receive gets."""

import weakref
from collections.abc import Sequence

import torch

from pp_bufferpool.lifetimes import Direction, Key, Lifetime, assign_slots
from pp_bufferpool.slots import Layout, Meter, Slot

Tensors = list[torch.Tensor | None]


class Shelf:
    """The slots of a rank.

    Which receive uses which slot is planned from the order, so a microbatch's address is the same
    in every step. But a slot is lent only while nobody holds its memory, whatever the plan says:
    receives stay right where a model keeps what it was given, where another schedule runs the same
    stages in another order, and after a step that failed.

    Args:
        lifetimes: Of this rank's receives.
        slack: Slots beyond those that are in use at once.
        device: Where the slots are.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], slack: int, device: torch.device) -> None:
        self.slots: list[Slot] = []
        self.meter = Meter()
        self.layouts: dict[tuple[int, Direction], Layout] = {}
        self._lifetimes, self._slack, self._device = lifetimes, slack, device
        self._slot_of: dict[Key, Slot] = {}
        self._planned = False
        self.poison = False

    def clear(self) -> None:
        """Let go of all memory."""
        self.slots, self._slot_of, self._planned = [], {}, False

    def set_layout(self, stage_index: int, direction: Direction, layout: Layout) -> None:
        """Say what a stage receives from one side, once or again."""
        owner = stage_index, direction
        if owner not in self.layouts or self.layouts[owner].sizes != layout.sizes:
            self._planned = False
        self.layouts[owner] = layout

    def lend(self, key: Key) -> Tensors:
        """Return tensors for a receive that nobody else holds."""
        layout = self.layouts[key[0], key[1]]
        if not layout.num_tensors:
            return [None for _ in layout.examples]
        if not self._planned:
            self._plan()
        if self.poison:
            self.poison_free_slots()
        tensors = self._free_slot(key, layout).lend(layout)
        example = next(tensor for tensor in tensors if tensor is not None)
        self.meter.enter()
        weakref.finalize(example, self.meter.leave).atexit = False
        return tensors

    def _free_slot(self, key: Key, layout: Layout) -> Slot:
        planned = self._slot_of.get(key)
        if planned is not None and planned.is_free:
            return planned
        # The smallest that will do: a larger one is another receive's.
        fitting = [slot for slot in self.slots if slot.fits(layout) and slot.is_free]
        if fitting:
            return min(fitting, key=lambda slot: slot.nbytes)
        self.meter.fallbacks += 1
        # Whoever holds the slot's memory keeps it, and the slot gets new one.
        return planned or Slot(self._device, self.meter)

    def _plan(self) -> None:
        """Assign slots anew; memory that is there already serves the largest."""
        sizes = {owner: layout.nbytes for owner, layout in self.layouts.items()}
        known = [life for life in self._lifetimes if (life.stage_index, life.direction) in sizes]
        plan = assign_slots(known, self._slack, sizes)
        old = sorted(self.slots, key=lambda slot: slot.nbytes)
        missing = len(plan.sizes) - len(old)
        new = [Slot(self._device, self.meter) for _ in range(missing)]
        self.slots = new + old[max(0, -missing) :]
        self._slot_of = {key: self.slots[number] for key, number in plan.slot_of.items()}
        self._planned = True

    def poison_free_slots(self) -> None:
        """Fill the memory of slots that nobody holds with NaN."""
        for slot in self.slots:
            slot.poison()
