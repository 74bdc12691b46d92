"""Shapes as functions of the batch size and the sequence length, told from traced forwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Primes that no model has as a size, so that a traced dim tells what it depends on. Fake tensors
# have no memory: a large batch costs nothing.
BATCH, LENGTHS = 211, (13, 31)


@dataclass(frozen=True)
class Dim:
    """The size of one dim: `(offset + slope * length) * (batch size, or 1)`."""

    offset: int
    """What does not depend on the length."""
    slope: int
    """What one more token adds."""
    batch: bool
    """Whether the batch size multiplies it."""

    def size(self, batch_size: int, seq_len: int) -> int:
        """Return the size for a batch."""
        return (self.offset + self.slope * seq_len) * (batch_size if self.batch else 1)


@dataclass(frozen=True)
class BoundaryShape:
    """The shape of a traced tensor, for any batch size and sequence length."""

    dims: tuple[Dim, ...]
    """Its dims, in order."""
    dtype: torch.dtype
    """The dtype the model computes there."""
    requires_grad: bool = True
    """Whether a gradient comes back for it."""

    def sizes(self, batch_size: int, seq_len: int) -> list[int]:
        """Return the sizes of the dims."""
        return [dim.size(batch_size, seq_len) for dim in self.dims]

    def tensor(self, batch_size: int, seq_len: int) -> torch.Tensor:
        """Return a meta tensor of that shape, as what crosses the boundary in training."""
        return torch.empty(
            self.sizes(batch_size, seq_len),
            dtype=self.dtype,
            device="meta",
            requires_grad=self.requires_grad and self.dtype.is_floating_point,
        )

    def batch_and_seq(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the batch size and sequence length that give hidden states of `shape`."""
        batch_size, seq_len = 1, 1
        for dim, size in zip(self.dims, shape, strict=True):
            if dim.slope and not dim.batch:
                seq_len = (size - dim.offset) // dim.slope
        for dim, size in zip(self.dims, shape, strict=True):
            if dim.batch:
                batch_size = size // dim.size(1, seq_len)
        return batch_size, seq_len


@dataclass(frozen=True)
class TracedShape:
    """What one forward on fake tensors tells of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TracedShape":
        """Return the shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def has_length(self) -> bool:
        """Whether the length that was traced with can be seen in it."""
        return any(_batchless(size)[0] % LENGTHS[0] == 0 for size in self.sizes if size)


def shape_of(short: TracedShape, long: TracedShape | None = None) -> BoundaryShape:
    """Return a shape as a function, from a forward with the first length and one with the second.

    With one forward alone a dim depends on the length if it is a multiple of it.

    Raises:
        ValueError: If the dims of the two do not grow evenly with the length.
    """
    if long is None:
        return BoundaryShape(tuple(map(_dim, short.sizes)), short.dtype)
    if len(short.sizes) != len(long.sizes):
        raise ValueError(f"a tensor has {short.sizes} for one length and {long.sizes} for another")
    dims = []
    for first, second in zip(short.sizes, long.sizes, strict=True):
        (first, batch), (second, _) = _batchless(first), _batchless(second)
        slope, rest = divmod(second - first, LENGTHS[1] - LENGTHS[0])
        if rest:
            raise ValueError(
                f"a dim is {first} for {LENGTHS[0]} tokens and {second} for {LENGTHS[1]}: it does "
                "not grow evenly with the length"
            )
        dims.append(Dim(first - slope * LENGTHS[0], slope, batch))
    return BoundaryShape(tuple(dims), short.dtype)


def map_shapes(short: Any, long: Any = None) -> Any:
    """Return a value with `shape_of` of every traced shape in it, from one or two forwards."""
    if isinstance(short, TracedShape):
        return shape_of(short, long if isinstance(long, TracedShape) else None)
    if isinstance(short, dict):
        others = long if isinstance(long, dict) else {}
        return {key: map_shapes(each, others.get(key)) for key, each in short.items()}
    if isinstance(short, tuple | list):
        items = long if isinstance(long, tuple | list) and len(long) == len(short) else ()
        mapped = [map_shapes(each, items[i] if items else None) for i, each in enumerate(short)]
        return mapped if isinstance(short, list) else tuple(mapped)
    return short


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with its tensors changed, also those in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(each, change) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _batchless(size: int) -> tuple[int, bool]:
    batch = size > 0 and size % BATCH == 0
    return (size // BATCH if batch else size), batch


def _dim(size: int) -> Dim:
    rest, batch = _batchless(size)
    # A constant multiple of 13, such as a hidden size of 52, is no sequence length: lengths are
    # told apart from it by standing alone or beside the batch size.
    seq = rest > 0 and rest % LENGTHS[0] == 0 and (rest == LENGTHS[0] or batch)
    return Dim(0, rest // LENGTHS[0], batch) if seq else Dim(rest, 0, batch)
