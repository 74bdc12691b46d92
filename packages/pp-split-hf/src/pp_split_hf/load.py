"""A checkpoint's weights into a stage: those that the stage owns, and no others."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pp_split_hf.destination import Destination, StageTensor
from pp_split_hf.dtypes import cast_dtypes
from pp_split_hf.hub import resolve_checkpoint
from pp_split_hf.initialize import initialize_buffers, move_stages
from pp_split_hf.prune import stage_part
from pp_split_hf.safetensors_files import (
    CheckpointError,
    MappedFiles,
    StoredTensor,
    find_files,
    read_headers,
)
from pp_split_hf.transformers_private import Region, regions, run_transform
from pp_split_hf.weight_map import Conversion, WeightMap, map_weights, same_tensors

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and those to be read in all."""

_PIECE = 4 << 20  # bytes of a file that are in memory beside their copy


def load_stage_weights(
    part: nn.Module,
    checkpoint: str | Path,
    device: torch.device | str | int,
    dtype: torch.dtype | None = None,
    *,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read a stage's weights from a Hugging Face checkpoint, and nothing else from it.

    Names and tensors are translated as `from_pretrained` does (experts stored one by one, renamed
    keys, fused projections). A tied weight is read on every stage that holds it. The files are
    mapped, and each tensor is copied once, straight to where it belongs; parameters with values
    are written in place, those on the meta device get memory. No rank needs another: the whole
    checkpoint is checked by its headers, on every rank alike, before anything is read.

    Args:
        part: A stage's module; see `split_model_into_stages`.
        checkpoint: A folder with safetensors files, one such file, or a hub id.
        device: Where the weights are to be.
        dtype: Of floating point parameters, but for those that the architecture keeps in float32;
            None keeps that of the part. Buffers always keep theirs.
        allow_missing: Leave on the meta device what the checkpoint does not have, such as a new
            head; `initialize_stage_weights` gives it values.
        allow_unexpected: Leave out what the checkpoint has and the model has not, such as the head
            of another task.
        progress: Called as bytes are read.

    Raises:
        CheckpointError: Listing the tensors that are missing, unexpected or of another shape, and
            the files that are absent or cut off.
    """
    known = stage_part(part)
    if known is None:
        raise TypeError("part is no stage's module: make it with split_model_into_stages")
    weights = CheckpointWeights(known.skeleton, checkpoint)
    if problems := weights.problems([part], allow_missing, allow_unexpected):
        raise CheckpointError("\n".join(problems))
    weights.load([part], device, dtype, progress)


class CheckpointWeights:
    """A checkpoint as seen by a model; only headers are read at first.

    Args:
        skeleton: The whole model on the meta device; see `StagePart.skeleton`.
        checkpoint: A folder with safetensors files, one such file, or a hub id.

    Raises:
        CheckpointError: If the files are absent, cut off or no safetensors files.
    """

    def __init__(self, skeleton: nn.Module, checkpoint: str | Path) -> None:
        self.skeleton = skeleton
        self.checkpoint = str(checkpoint)
        self.stored = read_headers(find_files(resolve_checkpoint(checkpoint)))
        self._files = MappedFiles()

    @cached_property
    def map(self) -> WeightMap:
        """How the stored tensors become the model's."""
        return map_weights(self.skeleton, self.stored)

    def problems(
        self,
        parts: Sequence[nn.Module],
        allow_missing: bool = False,
        allow_unexpected: bool = False,
    ) -> list[str]:
        """Return all that is wrong; nothing is sent.

        It is the same on every rank, but for a weight that is stored twice: that is told where
        `parts` have it.
        """
        config: Any = getattr(self.skeleton, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            return [
                f"{self.checkpoint} is quantized (quantization_config in its config), which is not "
                "read: dequantize it first"
            ]
        problems = self.map.problems(self.checkpoint, allow_missing, allow_unexpected)
        held = {name for part in parts for name in part.state_dict()}
        return problems + [
            f"{self.checkpoint} has {first} and {second} with different values, which are one "
            "weight in the model: set tie_word_embeddings=False in its config, or drop one"
            for first, second in self._stored_twice()
            if held & {first, second} and self._differ(first, second)
        ]

    def load(
        self,
        parts: Sequence[nn.Module],
        device: torch.device | str | int,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Read what the given stages own; see `load_stage_weights`."""
        dtypes = {id(p): cast for part in parts for _, p, cast in cast_dtypes(part, dtype)}
        device = torch.empty(0, device=device).device  # with its index
        jobs = sorted(self._jobs(parts), key=lambda job: self._position(job[0]))
        total = sum(self._num_bytes(conversion) for conversion, _ in jobs)
        done = 0
        if progress is not None:
            progress(0, total)
        self._files.read_ahead(
            self.stored[name] for conversion, _ in jobs for name, _ in conversion.sources
        )
        for conversion, places in jobs:
            targets = {
                name: [
                    Destination.of(
                        same, device, dtypes.get(id(same[0].tensor), same[0].tensor.dtype)
                    )
                    for same in by_tensor
                ]
                for name, by_tensor in places.items()
            }
            for num_bytes in self._convert(conversion, targets):
                done += num_bytes
                if progress is not None:
                    progress(done, total)
            for destination in (each for several in targets.values() for each in several):
                destination.install()
        # Tables that are in no checkpoint.
        for part in parts:
            initialize_buffers(part, self.skeleton, device)
        move_stages(parts, device)

    def _jobs(
        self, parts: Sequence[nn.Module]
    ) -> Iterator[tuple[Conversion, dict[str, list[list[StageTensor]]]]]:
        """Yield each conversion that makes something of these parts, and its places by tensor."""
        own = [(part, part.state_dict(keep_vars=True)) for part in parts]
        names = {name: group for group in same_tensors(self.skeleton) for name in group}
        again = {second for _, second in self._stored_twice()}
        for conversion in self.map.conversions:
            places: dict[str, list[list[StageTensor]]] = {}
            for target in set(conversion.targets) - again:
                by_tensor: dict[int, list[StageTensor]] = {}
                for part, tensors in own:
                    for name in names.get(target, ()):
                        if name in tensors:
                            place = StageTensor(part, name, tensors[name])
                            by_tensor.setdefault(id(tensors[name]), []).append(place)
                if by_tensor:
                    places[target] = list(by_tensor.values())
            if places:
                yield conversion, places

    def _convert(
        self, conversion: Conversion, targets: dict[str, list[Destination]]
    ) -> Iterator[int]:
        """Fill destinations; yield the number of bytes read, piece by piece."""
        stored = [self.stored[name] for name, _ in conversion.sources]
        several = [destination for each in targets.values() for destination in each]
        if conversion.is_rename:
            yield from self._copy(stored[0], several, ())
            return
        patterns = [pattern for _, pattern in conversion.sources]
        shapes = [each.shape for each in stored]
        places = regions(conversion.transform, list(zip(patterns, shapes, strict=True)))
        if places is not None and not any(destination.is_shard for destination in several):
            for each, region in zip(stored, places, strict=True):
                yield from self._copy(each, several, region)
            return
        sources = [self._as(each, several[0].tensor.dtype) for each in stored]
        own = {source.untyped_storage().data_ptr() for source in sources}
        named = [(*name, source) for name, source in zip(conversion.sources, sources, strict=True)]
        del sources
        transform = copy.deepcopy(conversion.transform)
        made = run_transform(transform, conversion.name, named, self.skeleton)
        del named
        for name, destinations in targets.items():
            value = made.pop(name)
            # The whole of a storage that is no source's: nobody else has it.
            storage = value.untyped_storage()
            is_own = storage.nbytes() == value.nbytes and storage.data_ptr() not in own
            for destination in destinations[1:]:
                destination.fill(value)
            (destinations[0].take if is_own else destinations[0].fill)(value)
        for each in stored:
            self._files.release(each)
        yield self._num_bytes(conversion)

    def _as(self, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a stored tensor as another dtype; as its own it is the file's own bytes."""
        value = self._files.tensor(stored)
        if value.dtype != dtype:
            value = value.to(dtype)
            self._files.release(stored)
        return value

    @torch.no_grad()
    def _copy(
        self, stored: StoredTensor, destinations: list[Destination], region: Region
    ) -> Iterator[int]:
        """Copy a tensor into a region as it is; yield the number of bytes of each piece."""
        value = self._files.tensor(stored)
        if value.ndim == 0 or any(destination.is_shard for destination in destinations):
            for destination in destinations:
                destination.fill(value)
            self._files.release(stored)
            yield stored.num_bytes
            return
        views = [destination.view(region) for destination in destinations]
        row = stored.num_bytes // max(1, len(value))
        rows = max(1, _PIECE // max(1, row))
        for begin in range(0, len(value), rows):
            piece = value[begin : begin + rows]
            for view in views:
                view[begin : begin + rows].copy_(piece)
            self._files.release(stored, piece.nbytes)
            yield piece.nbytes

    def _position(self, conversion: Conversion) -> tuple[Path, int]:
        first = self.stored[conversion.sources[0][0]]
        return first.file, first.begin

    def _num_bytes(self, conversion: Conversion) -> int:
        return sum(self.stored[name].num_bytes for name, _ in conversion.sources)

    def _stored_twice(self) -> list[tuple[str, str]]:
        """Return pairs of made tensors that are one and the same in the model."""
        made = {target for conversion in self.map.conversions for target in conversion.targets}
        groups = [[n for n in group if n in made] for group in same_tensors(self.skeleton)]
        return [(first, other) for first, *others in filter(None, groups) for other in others]

    def _differ(self, first: str, second: str) -> bool:
        """Return whether two tensors are stored with different values, as far as that is easy."""
        made = {conversion.name: conversion for conversion in self.map.conversions}
        if not (first in made and second in made and made[first].is_rename):
            return False
        if not made[second].is_rename:
            return False
        one, other = (self.stored[made[name].sources[0][0]] for name in (first, second))
        values = [self._files.tensor(each).view(-1) for each in (one, other)]
        step = _PIECE // max(one.dtype.itemsize, other.dtype.itemsize)
        for begin in range(0, len(values[0]), step):
            a, b = (value[begin : begin + step] for value in values)
            if not torch.equal(a, b.to(a.dtype)):
                return True
            self._files.release(one, a.nbytes)
            self._files.release(other, b.nbytes)
        return False
