"""What a forward leaves for its backward: memory, and the operations that the backward undoes."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch


class SavedTensors:
    """Notes what is saved for a backward; `keep` is the hook that packs."""

    def __init__(self) -> None:
        self.shapes: list[tuple[Any, ...]] = []
        """Sizes and dtype of each saved tensor, in order."""
        self.has_unknown_sizes = False
        """Whether a fake tensor was saved whose size depends on values."""
        # The objects are kept, so that an id stands for one memory.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor, and return it."""
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            self.has_unknown_sizes = True
        else:
            self.shapes.append((*tensor.shape, tensor.dtype))
            self.add(tensor)
        return tensor

    def add(self, tensor: torch.Tensor) -> None:
        """Note the memory of a tensor that is kept without being saved."""
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = storage

    def add_common(self, one: "SavedTensors", other: "SavedTensors") -> None:
        """Note the memory that two others have both noted."""
        for key in one._storages.keys() & other._storages.keys():
            self._storages[key] = one._storages[key]

    def num_bytes(self, *apart: "SavedTensors") -> int:
        """Return the bytes of all memory noted, each once, but for what others noted."""
        left = self._storages.keys() - {key for other in apart for key in other._storages}
        return sum(self._storages[key].nbytes() for key in left)


def memory_of(tensors: Iterable[torch.Tensor]) -> SavedTensors:
    """Return a note of the memory of tensors."""
    saved = SavedTensors()
    for tensor in tensors:
        saved.add(tensor)
    return saved


def graph_of(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Iterator[Hashable]:
    """Yield the operations from outputs back to inputs, in an order that tells how they connect."""
    ends = {id(tensor) for tensor in inputs}
    numbers: dict[Any, int] = {}
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in numbers:
            yield numbers[node]
            continue
        numbers[node] = len(numbers)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield (id(variable) in ends, *variable.shape)
            continue
        yield node.name()
        stack += [following for following, _ in node.next_functions if following is not None]
