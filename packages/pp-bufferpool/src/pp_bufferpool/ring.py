"""The slots of one stage and direction at run time, and what they and their copies take."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pp_bufferpool import torch_private


@dataclass
class Meter:
    """Counts what is alive."""

    slot_bytes: int = 0
    live: int = 0
    live_bytes: int = 0
    peak_live: int = 0
    peak_bytes: int = 0

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor for as long as it exists."""
        self._change(1, tensor.nbytes)
        weakref.finalize(tensor, self._change, -1, -tensor.nbytes).atexit = False

    def _change(self, number: int, size: int) -> None:
        self.live += number
        self.live_bytes += size
        self.peak_live = max(self.peak_live, self.live)
        self.peak_bytes = max(self.peak_bytes, self.slot_bytes + self.live_bytes)


@dataclass
class Ring:
    """The slots of one stage and direction.

    Which microbatch uses which slot is planned, but a slot is lent only while it is free. So
    receives stay right even where another schedule runs the same stages in another order.
    """

    slot_of: dict[int, int]
    device: torch.device
    meter: Meter
    unpooled: int
    """Receives that torch would hold at once without the pool."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each tensor of one receive."""
    fallbacks: int = 0
    _slots: dict[int, torch_private.Buffers] = field(default_factory=dict)
    _lent: dict[int, int] = field(default_factory=dict)
    _layouts: tuple[Any, ...] = ()

    def renew(self, infos_of: Mapping[int, torch_private.Infos]) -> None:
        """Take up the receives that a stage has been set up with, once or again."""
        for infos in infos_of.values():
            torch_private.drop_buffers(infos)
        example: torch_private.Infos = next(iter(infos_of.values()), ())
        layouts = torch_private.layouts(example)
        # A slot that is still lent belongs to a step that failed, which may yet write to it.
        if layouts != self._layouts or self._lent:
            self.forget()
            self._layouts = layouts
            empty = torch_private.new_buffers(example, torch.device("meta"))
            self.sizes = [buffer.nbytes for buffer in empty if buffer is not None]

    def forget(self) -> None:
        """Let go of all slots."""
        self.meter.slot_bytes -= sum(slot.nbytes for slot in self.slot_tensors())
        self._slots.clear()
        self._lent.clear()

    def slot_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all slots."""
        return [b for slot in self._slots.values() for b in slot if b is not None]

    def post(
        self, microbatch: int, infos: torch_private.Infos, make_ops: Callable[[], list[Any]]
    ) -> list[Any]:
        """Make one microbatch's receive operations."""
        slot = self.slot_of.get(microbatch)
        if slot is None or slot in self._lent.values():
            self.fallbacks += 1
            buffers = torch_private.new_buffers(infos, self.device)
        else:
            if slot not in self._slots:
                self._slots[slot] = torch_private.new_buffers(infos, self.device)
                self.meter.slot_bytes += sum(b.nbytes for b in self._slots[slot] if b is not None)
            self._lent[microbatch] = slot
            buffers = self._slots[slot]
        return torch_private.receive_into(infos, buffers, make_ops)

    def take(self, microbatch: int, infos: torch_private.Infos, read: Callable[[int], Any]) -> Any:
        """Read one microbatch's receive, as a copy if it is in a slot."""
        if self._lent.pop(microbatch, None) is not None:
            for copy in torch_private.copy_buffers(infos, self.device):
                self.meter.watch(copy)
        received = read(microbatch)
        torch_private.drop_buffers(infos)
        return received
