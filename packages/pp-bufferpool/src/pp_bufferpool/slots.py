"""Memory that is lent to one receive at a time, and only while nobody else holds it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pp_bufferpool import torch_private


class Layout:
    """The tensors of one receive.

    Args:
        examples: What is received, on the meta device; None where nothing is.
    """

    def __init__(self, examples: Sequence[torch.Tensor | None]) -> None:
        self.examples = examples
        self.sizes = [0 if e is None else e.untyped_storage().nbytes() for e in examples]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return sum(example is not None for example in self.examples)


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
class Block:
    """Memory for one tensor."""

    storage: torch.UntypedStorage
    own_references: int = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody else holds the memory."""
        return self.references() == self.own_references

    def references(self) -> int:
        """Return how many hold the memory.

        Tensors are counted by the storage itself; who asked a tensor for its storage has a
        reference to this very Python object.
        """
        return torch_private.use_count(self.storage) + sys.getrefcount(self.storage)


@dataclass
class Slot:
    """Memory for one receive at a time, a block for each of its tensors."""

    device: torch.device
    meter: Meter
    _blocks: list[Block | None] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, 0 before the first loan."""
        return sum(block.storage.nbytes() for block in self._blocks if block is not None)

    @property
    def is_free(self) -> bool:
        """Whether nobody but this slot holds its memory.

        Whoever may still read a receive holds it: the operation that fills it, a graph that saved
        it, a send of it, a module or hook that kept a view of it.
        """
        return all(block.is_free for block in self._blocks if block is not None)

    def fits(self, layout: Layout) -> bool:
        """Whether the memory is there and large enough."""
        sizes = [0 if block is None else block.storage.nbytes() for block in self._blocks]
        return len(sizes) == len(layout.sizes) and all(map(int.__ge__, sizes, layout.sizes))

    def lend(self, layout: Layout) -> list[torch.Tensor | None]:
        """Return tensors for a receive, in new memory unless the old is large enough and free.

        They are leaves that know nothing of earlier ones: neither their graphs nor their versions.
        """
        if not (self.fits(layout) and self.is_free):
            self._blocks = []  # before the new are there, so that the allocator may use them
            self._blocks = [self._new_block(size) if size else None for size in layout.sizes]
            self.meter.allocations += 1
            self.meter.allocated_bytes += layout.nbytes
        return [
            _tensor_in(example, block, self.device)
            for example, block in zip(layout.examples, self._blocks, strict=True)
        ]

    def poison(self) -> None:
        """Fill the memory with NaN (ones in each bit) if it is free."""
        if self.is_free:
            for block in self._blocks:
                if block is not None:
                    whole = torch.empty(0, dtype=torch.uint8, device=self.device)
                    whole.set_(block.storage).fill_(255)

    def _new_block(self, nbytes: int) -> Block:
        block = Block(torch_private.new_storage(nbytes, self.device))
        block.own_references = block.references()
        return block


def _tensor_in(
    example: torch.Tensor | None, block: Block | None, device: torch.device
) -> torch.Tensor | None:
    if example is None:
        return None
    if block is None:  # a tensor without elements
        return torch.empty_like(example, device=device)
    return torch.empty(0, dtype=example.dtype, device=device).set_(
        block.storage, 0, example.shape, example.stride()
    )
