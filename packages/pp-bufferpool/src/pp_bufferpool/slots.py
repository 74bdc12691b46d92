"""Memory that is lent to one receive at a time, and only while nobody else holds it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pp_bufferpool import torch_private

_ALIGNMENT = 512  # bytes, as CUDA's allocator has it; kernels are compiled for it


class Layout:
    """Where the tensors of one receive lie in a slot.

    Args:
        examples: What is received, on the meta device; None where nothing is.
    """

    def __init__(self, examples: Sequence[torch.Tensor | None]) -> None:
        self._examples = examples
        self._offsets = []
        end = 0
        for example in examples:
            self._offsets.append(end)
            if example is not None:
                end += -example.untyped_storage().nbytes() // _ALIGNMENT * -_ALIGNMENT
        self.nbytes = end

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return sum(example is not None for example in self._examples)

    def tensors(self, storage: torch.UntypedStorage | None) -> list[torch.Tensor | None]:
        """Return new tensors of this layout in some memory; none is needed for no tensors.

        They are leaves that know nothing of earlier ones: neither their graphs nor their versions.
        """
        return [
            None
            if example is None or storage is None
            else torch.empty(0, dtype=example.dtype, device=storage.device).set_(
                storage, offset // example.itemsize, example.shape, example.stride()
            )
            for example, offset in zip(self._examples, self._offsets, strict=True)
        ]


@dataclass
class Meter:
    """Counts of one pool since its installation."""

    allocations: int = 0
    """How often memory was allocated."""
    allocated_bytes: int = 0
    """How much that was together."""
    fallbacks: int = 0
    """Receives for which no slot was free."""
    live: int = 0
    """Receives that exist now."""
    peak_live: int = 0
    """The most that existed at once."""

    def enter(self) -> None:
        """Count a receive that begins to exist."""
        self.live += 1
        self.peak_live = max(self.peak_live, self.live)

    def leave(self) -> None:
        """Count a receive that no longer exists."""
        self.live -= 1


@dataclass
class Slot:
    """Memory for one receive at a time."""

    device: torch.device
    meter: Meter
    _storage: torch.UntypedStorage | None = None
    _own_references: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, 0 before the first loan."""
        return 0 if self._storage is None else self._storage.nbytes()

    @property
    def is_free(self) -> bool:
        """Whether nobody but this slot holds its memory.

        Whoever may still read a receive holds it: the operation that fills it, a graph that saved
        it, a send of it, a module or hook that kept a view of it.
        """
        return self._storage is None or self._references() == self._own_references

    def fits(self, nbytes: int) -> bool:
        """Whether the memory is there and large enough."""
        return self._storage is not None and self._storage.nbytes() >= nbytes

    def lend(self, layout: Layout) -> list[torch.Tensor | None]:
        """Return tensors for a receive, in new memory unless the old is large enough and free."""
        if not (self.fits(layout.nbytes) and self.is_free):
            self._storage = None  # before the new is there, so that the allocator may use it
            self._storage = torch_private.new_storage(layout.nbytes, self.device)
            self._own_references = self._references()
            self.meter.allocations += 1
            self.meter.allocated_bytes += layout.nbytes
        assert self._storage is not None
        return layout.tensors(self._storage)

    def poison(self) -> None:
        """Fill the memory with NaN (ones in each bit) if it is free."""
        if self._storage is not None and self.is_free:
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage).fill_(255)

    def _references(self) -> int:
        # Tensors are counted by the storage itself; who asked a tensor for its storage has a
        # reference to this very Python object.
        assert self._storage is not None
        return torch_private.use_count(self._storage) + sys.getrefcount(self._storage)
