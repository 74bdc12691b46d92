"""Where a tensor that is read goes: into memory that is there, or into new memory of a stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pp_split_hf.torch_private import local_region, set_parameter


@dataclass(frozen=True)
class StageTensor:
    """A tensor of a stage by its name."""

    part: nn.Module
    """The stage's module."""
    name: str
    """FQN of the tensor."""
    tensor: torch.Tensor
    """What is there now."""


class Destination:
    """Memory for one tensor of the model, which may have several names.

    Args:
        places: The tensor under all its names.
        tensor: What to fill.
        is_there: Whether that is the one that is there already.
    """

    def __init__(self, places: Sequence[StageTensor], tensor: torch.Tensor, is_there: bool) -> None:
        self._places = places
        self._is_there = is_there
        self.tensor = tensor
        self._local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._region = local_region(tensor) if isinstance(tensor, DTensor) else None

    @classmethod
    def of(
        cls, places: Sequence[StageTensor], device: torch.device, dtype: torch.dtype
    ) -> "Destination":
        """Return memory on `device`: that of a parameter that is there already, else new memory."""
        current = places[0].tensor
        is_parameter = isinstance(current, nn.Parameter)
        if is_parameter and current.device == device and current.dtype == dtype:
            return cls(places, current.detach(), True)
        # A buffer is always new: the model that the stage was cut from may share it.
        new = torch.empty_like(current.detach(), device=device, dtype=dtype)
        return cls(places, new, False)

    @property
    def is_shard(self) -> bool:
        """Whether it takes a part of a tensor alone."""
        return self._region is not None

    def view(self, region: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """Return the memory of a region; of a shard there are none."""
        return self._local[region]

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Fill it from the whole tensor, of which it may be a shard."""
        self._local.copy_(value if self._region is None else value[self._region])

    def take(self, value: torch.Tensor) -> None:
        """Fill it with a tensor that nobody else has, without a copy where that will do."""
        alike = (value.device, value.dtype, value.shape) == (
            self.tensor.device, self.tensor.dtype, self.tensor.shape,
        )  # fmt: skip
        if self._is_there or self.is_shard or not alike or not value.is_contiguous():
            self.fill(value)
        else:
            self.tensor = value

    def install(self) -> None:
        """Put the tensor where it belongs, under all its names."""
        if self._is_there:
            return
        current = self._places[0].tensor
        if isinstance(current, nn.Parameter):
            new = nn.Parameter(self.tensor, requires_grad=current.requires_grad)
            new.__dict__.update(current.__dict__)
            for place in self._places:
                owner, _, name = place.name.rpartition(".")
                set_parameter(place.part.get_submodule(owner), name, new)
        else:
            for place in self._places:
                owner, _, name = place.name.rpartition(".")
                setattr(place.part.get_submodule(owner), name, self.tensor)
