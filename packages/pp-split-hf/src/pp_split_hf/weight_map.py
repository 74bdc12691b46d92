"""Which stored tensors make which of a model's own, worked out before any of them is read."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pp_split_hf.safetensors_files import StoredTensor
from pp_split_hf.transformers_private import (
    NameTranslation,
    ignored_names,
    natural_order,
    run_transform,
)

_MAX_SHOWN = 10


@dataclass
class Conversion:
    """Stored tensors and those of the model that they become."""

    name: str
    """The first tensor that is made."""
    transform: Any
    """How; one that has not been used."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Stored name, and the pattern that it goes in as."""
    is_rename: bool = True
    """Whether one tensor becomes one, as it is."""
    targets: tuple[str, ...] = ()
    """All that are made."""


@dataclass(frozen=True)
class WeightMap:
    """From a checkpoint to a whole model."""

    conversions: tuple[Conversion, ...]
    """In the order of the stored names."""
    missing: tuple[str, ...]
    """Tensors of the model that the checkpoint has under none of their names."""
    unexpected: tuple[str, ...]
    """Stored names that are nothing in the model."""
    misshapen: tuple[str, ...]
    """A sentence per tensor that would get another shape, or cannot be made."""

    def problems(
        self, checkpoint: str, allow_missing: bool = False, allow_unexpected: bool = False
    ) -> list[str]:
        """Return what is wrong, names listed up to ten."""
        found = [
            ("lacks", () if allow_missing else self.missing, "allow_missing"),
            (
                "has, and the model has not,",
                () if allow_unexpected else self.unexpected,
                "allow_unexpected",
            ),
            ("has in another shape", self.misshapen, None),
        ]
        return [
            f"{checkpoint} {what} {len(names)} tensor{'s' if len(names) > 1 else ''}: "
            + ", ".join(names[:_MAX_SHOWN])
            + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
            + (f" (if that is meant to be so, pass {option}=True)" if option else "")
            for what, names, option in found
            if names
        ]


def map_weights(skeleton: nn.Module, stored: Mapping[str, StoredTensor]) -> WeightMap:
    """Find out how a checkpoint's tensors become a model's; every rank finds the same.

    Conversions are tried out on meta tensors, so wrong shapes show before anything is read.

    Args:
        skeleton: The whole model on the meta device. It remembers what was renamed, for saving.
        stored: All tensors of the checkpoint.
    """
    wanted = skeleton.state_dict()
    translation = NameTranslation(skeleton)
    made: dict[str, Conversion] = {}
    unexpected = []
    for name in sorted(stored, key=natural_order):
        renamed, pattern = translation.translate(name)
        if renamed not in wanted:
            unexpected.append(name)
            continue
        if renamed not in made:
            transform = translation.transform(name, renamed, pattern)
            made[renamed] = Conversion(renamed, transform, is_rename=pattern is None)
        made[renamed].sources.append((name, pattern or name))
    translation.remember(skeleton)
    misshapen: list[str] = []
    for conversion in made.values():
        misshapen += _try_out(conversion, skeleton, wanted, stored)
    covered = {target for conversion in made.values() for target in conversion.targets}
    covered |= {conversion.name for conversion in made.values()}
    names = [group for group in same_tensors(skeleton) if covered.isdisjoint(group)]
    not_missed, overlooked = ignored_names(skeleton)
    return WeightMap(
        tuple(made.values()),
        tuple(g[0] for g in names if not (not_missed and not_missed.search(g[0]))),
        tuple(n for n in unexpected if not (overlooked and overlooked.search(n))),
        tuple(misshapen),
    )


def same_tensors(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names in a model's state dict, those of one and the same tensor together."""
    names: dict[int, list[str]] = {}
    kept = model.state_dict(keep_vars=True)
    for name, tensor in kept.items():
        names.setdefault(id(tensor), []).append(name)
    return [tuple(group) for group in names.values()]


def _try_out(
    conversion: Conversion,
    skeleton: nn.Module,
    wanted: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
) -> Iterable[str]:
    """Note what a conversion makes, and yield what is wrong with that."""
    name = conversion.name
    if conversion.is_rename:
        conversion.targets = (name,)
        shape = stored[conversion.sources[0][0]].shape
        if shape != tuple(wanted[name].shape):
            yield f"{name} ({list(shape)} instead of {list(wanted[name].shape)})"
        return
    tensors = [
        (
            source,
            pattern,
            torch.empty(stored[source].shape, dtype=wanted[name].dtype, device="meta"),
        )
        for source, pattern in conversion.sources
    ]
    try:
        made = run_transform(copy.deepcopy(conversion.transform), name, tensors, skeleton)
    except Exception as error:
        yield f"{name} (cannot be made of {len(tensors)} tensors: {type(error).__name__}: {error})"
        return
    conversion.targets = tuple(made)
    for target, tensor in made.items():
        if target not in wanted:
            yield f"{target} (made of {conversion.sources[0][0]}, and not in the model)"
        elif tensor.shape != wanted[target].shape:
            yield f"{target} ({list(tensor.shape)} instead of {list(wanted[target].shape)})"
