"""Images and videos of a batch: each microbatch gets those of its own rows of text.

How many a row has is told by its placeholder tokens, and torch's schedules cut evenly. So they are
cut here, into a table that every microbatch is given whole beside its own number; just before a
stage's module is called, the entry with that number takes their place.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pp_autopipeline.checks import refuse

_NUMBER, _TABLE = "pp_microbatch", "pp_images"
_ADVICE = "pass what the processor returns for these rows of text, complete and in their order"


class _Modality(NamedTuple):
    """The arguments of one kind of item, as Transformers' models name them."""

    name: str
    values: str
    """Pixels, a row per item, or a row per patch if there is a grid."""
    grid: str
    """Patches of each item in time, height and width."""
    further: str
    """Something else with a row per item."""


_MODALITIES = (
    _Modality("image", "pixel_values", "image_grid_thw", "image_sizes"),
    _Modality("video", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
)
_ARGUMENTS = frozenset(name for modality in _MODALITIES for name in modality[1:])
# Positions are computed from these on every stage. The encoders, on the first, take all others.
_EVERY_STAGE = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts"})


@dataclass(frozen=True)
class MicrobatchImages:
    """The images and videos of one batch, and where to cut them."""

    values: dict[str, Any]
    """Arguments as they were given."""
    bounds: dict[str, list[int]]
    """Per argument the first row of each microbatch, and the number of rows."""

    def keywords(
        self, device: torch.device, has_first: bool
    ) -> tuple[dict[str, Any], dict[str, int | None]]:
        """Return what to pass to the schedule, and the dims to cut that along.

        Args:
            device: Where the stages are.
            has_first: Whether this rank has the first stage; the others need no pixels.
        """
        table = _Table(len(next(iter(self.bounds.values()))) - 1)
        for name, value in self.values.items():
            if not has_first and name not in _EVERY_STAGE:
                continue
            if isinstance(value, torch.Tensor):
                value = value.to(device, non_blocking=True)
            for number, (start, end) in enumerate(itertools.pairwise(self.bounds[name])):
                # Encoders cannot run on nothing. An empty grid still says how to count positions.
                if end > start or name in _EVERY_STAGE:
                    table.entries[number][name] = value[start:end]
        numbers = torch.arange(len(table.entries))
        return {_NUMBER: numbers, _TABLE: table}, {_NUMBER: 0, _TABLE: None}


class _Table:
    """Keywords by microbatch; a class of its own, since torch takes lists and dicts apart."""

    def __init__(self, num_microbatches: int) -> None:
        self.entries: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]


def place_images(module: nn.Module, is_first: bool) -> None:
    """Have a stage's module take its images out of the table; without one nothing changes.

    To be called after the module was sharded: whatever casts or moves arguments must find them.
    """
    hook = partial(_place, is_first=is_first)
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _place(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if _TABLE not in kwargs:
        return None
    others = {name: value for name, value in kwargs.items() if name not in (_NUMBER, _TABLE)}
    entry = kwargs[_TABLE].entries[int(kwargs[_NUMBER])]
    mine = {name: value for name, value in entry.items() if is_first or name in _EVERY_STAGE}
    return args, {**others, **mine}


@dataclass(frozen=True)
class ImageRules:
    """How a model's images and videos are found in its token ids."""

    tokens: Mapping[str, int | None]
    """The placeholder token of "image" and of "video"."""
    merge_size: int
    """Patches per token, in height and in width."""
    patch_size: int
    """Pixels per patch, in height and in width."""

    @classmethod
    def of(cls, config: Any) -> "ImageRules | None":
        """Return the rules of a model with this config; None if it takes text alone."""
        tokens = {m.name: getattr(config, f"{m.name}_token_id", None) for m in _MODALITIES}
        if all(token is None for token in tokens.values()):
            return None
        vision = getattr(config, "vision_config", None)
        merge_size = getattr(vision, "spatial_merge_size", None)
        merge_size = merge_size or getattr(config, "spatial_merge_size", None) or 1
        patch_size = getattr(vision, "patch_size", None)
        return cls(tokens, merge_size, patch_size if isinstance(patch_size, int) else 1)

    def cut(
        self, input_ids: torch.Tensor, kwargs: Mapping[str, Any], num_microbatches: int
    ) -> tuple[MicrobatchImages | None, dict[str, Any]]:
        """Return the images among a batch's arguments, ready to be cut, and all other arguments.

        Raises:
            ValueError: Listing what does not fit the placeholder tokens of `input_ids`, or cannot
                be told apart by row.
        """
        given = {n: v for n, v in kwargs.items() if n in _ARGUMENTS and v is not None}
        problems = [
            f"{name} cannot be cut: of images and videos only {', '.join(sorted(_ARGUMENTS))} can"
            for name, value in kwargs.items()
            if name.startswith(("pixel_", "image_", "video_")) and value is not None
            if name not in _ARGUMENTS
        ]
        bounds: dict[str, list[int]] = {}
        for modality in _MODALITIES:
            mine = {name: given[name] for name in modality[1:] if name in given}
            if mine:
                try:
                    bounds |= self._bounds(modality, mine, input_ids, num_microbatches)
                except ValueError as error:
                    problems.append(str(error))
        refuse("cannot cut the images of this batch into microbatches", problems)
        others = {name: value for name, value in kwargs.items() if name not in given}
        return (MicrobatchImages(given, bounds) if given else None), others

    def _bounds(
        self, modality: _Modality, given: dict[str, Any], input_ids: torch.Tensor, count: int
    ) -> dict[str, list[int]]:
        """Return for each argument of one modality where each of `count` microbatches begins."""
        token = self.tokens[modality.name]
        if token is None:
            raise ValueError(
                f"{next(iter(given))} was given, but the model's config has no "
                f"{modality.name}_token_id to find {modality.name}s in input_ids by"
            )
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) and name != "second_per_grid_ts":
                raise ValueError(f"{name} is a {type(value).__name__}: pass a tensor")
        # The one look at values: of ids on a GPU it waits for them.
        in_rows = (input_ids == token).sum(dim=1).tolist()
        tokens, rows = self._sizes(modality, given, sum(in_rows))
        ends = [0, *itertools.accumulate(rows)]
        for name, value in given.items():
            by_patch = name == modality.values and modality.grid in given
            wanted = ends[-1] if by_patch else len(tokens)
            if len(value) != wanted:
                patches = f" of {modality.grid}, which have {wanted} patches (t * h * w)"
                raise ValueError(
                    f"{name} has {len(value)} rows for {len(tokens)} {modality.name}s"
                    f"{patches if by_patch else ''}: {_ADVICE}"
                )
        items = _items_per_row(modality, tokens, in_rows)
        step = len(items) // count
        starts = [0, *itertools.accumulate(sum(items[i * step :][:step]) for i in range(count))]
        return {
            name: [ends[i] for i in starts] if name == modality.values else starts for name in given
        }

    def _sizes(
        self, modality: _Modality, given: dict[str, Any], total: int
    ) -> tuple[list[int], list[int]]:
        """Return for each item how many placeholder tokens it has, and how many rows of values."""
        values, grid = given.get(modality.values), given.get(modality.grid)
        sizes = given.get("image_sizes")
        if grid is not None:
            patches = grid.prod(dim=-1).tolist()
            return [each // self.merge_size**2 for each in patches], patches
        if values is None or values.ndim < 3:
            raise ValueError(
                f"{next(iter(given))} was given without "
                f"{modality.values if values is None else modality.grid}: {_ADVICE}"
            )
        count = len(values)
        if sizes is not None:
            tokens = (sizes // (self.patch_size * self.merge_size)).prod(dim=-1).tolist()
            if sum(tokens) == total:
                return tokens, [1] * count
            if bool((sizes != sizes[:1]).any()):
                raise ValueError(
                    f"image_sizes has images of different sizes, whose {sum(tokens)} patches are "
                    f"not the {total} image placeholder tokens of input_ids: {_ADVICE}. Of a "
                    "model with more or fewer tokens than patches, give images of one size"
                )
        # What has one size has as many tokens each.
        share, rest = divmod(total, max(count, 1))
        if rest or (count and not share):
            raise ValueError(
                f"{modality.values} has {count} {modality.name}s, but input_ids {total} "
                f"{modality.name} placeholder tokens, which cannot be shared out evenly: {_ADVICE}"
            )
        return [share] * count, [1] * count


def _items_per_row(modality: _Modality, tokens: Sequence[int], in_rows: Sequence[int]) -> list[int]:
    """Return how many items each row of text has, from the placeholder tokens of both.

    Raises:
        ValueError: If they cannot be dealt out in order, each to one row.
    """
    what = f"{modality.name} placeholder tokens"
    if sum(tokens) != sum(in_rows):
        raise ValueError(
            f"the {len(tokens)} {modality.name}s given take {sum(tokens)} {what}, but input_ids "
            f"has {sum(in_rows)}: {_ADVICE}"
        )
    items: list[int] = []
    item = 0
    for row, wanted in enumerate(in_rows):
        first, found = item, 0
        while found < wanted:
            found += tokens[item]
            item += 1
        if found != wanted:
            raise ValueError(
                f"row {row} of input_ids has {wanted} {what}, but {modality.name}s {first} to "
                f"{item - 1}, whose turn it is, take {found}: {_ADVICE}"
            )
        items.append(item - first)
    if item < len(tokens):
        raise ValueError(f"{modality.name} {item} takes no {what}: {_ADVICE}")
    return items
