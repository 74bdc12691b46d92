"""Every name inside Transformers that this package relies on, read against 5.24.0.

`from_pretrained` and `save_pretrained` translate between a checkpoint's names and tensors and the
model's own: experts stored one by one, renamed keys, fused projections. The translation is a list
of transforms per architecture; here is how it is asked for and used.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations import moe

natural_order = dot_natural_key


class NameTranslation:
    """From a checkpoint's names to a model's, as `from_pretrained` goes.

    Args:
        skeleton: The whole model; its tensors may be on the meta device.
    """

    def __init__(self, skeleton: nn.Module) -> None:
        self._names = skeleton.state_dict()
        self._prefix: str | None = getattr(skeleton, "base_model_prefix", None)
        self._transforms: list[WeightTransform] = []
        if isinstance(skeleton, PreTrainedModel):
            self._transforms = get_model_conversion_mapping(skeleton)
        self._renamings = [t for t in self._transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in self._transforms if isinstance(t, WeightConverter)]

    def translate(self, name: str) -> tuple[str, str | None]:
        """Return the model's name for a stored one, and the pattern of the conversion, if any.

        Where one conversion makes several tensors it is the first one's name.
        """
        names, prefix = self._names, self._prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, names)
        if renamed not in names and name in names:
            renamed, pattern = rename_source_key(name, [], [], prefix, names)
        return renamed, pattern

    def transform(self, name: str, renamed: str, pattern: str | None) -> WeightTransform:
        """Return a fresh transform that makes the tensor `renamed`."""
        if pattern is None:
            return WeightRenaming(name, renamed)
        return deepcopy(next(t for t in self._converters if pattern in t.source_patterns))

    def remember(self, skeleton: nn.Module) -> None:
        """Let the model know which transforms have renamed something: saving turns them round."""
        if isinstance(skeleton, PreTrainedModel):
            used = [transform for transform in self._transforms if transform.was_used()]
            vars(skeleton)["_weight_conversions"] = used


def run_transform(
    transform: Any,
    name: str,
    sources: list[tuple[str, str, torch.Tensor]],
    skeleton: nn.Module,
) -> dict[str, torch.Tensor]:
    """Return what a transform makes, by the model's names.

    Args:
        transform: See `NameTranslation.transform`.
        name: The first name it makes.
        sources: Stored name, pattern and tensor of everything that goes in, in order.
        skeleton: The whole model.
    """
    for stored, pattern, tensor in sources:
        transform.add_tensor(name, stored, pattern, tensor)
    made = transform.convert(name, model=skeleton, config=getattr(skeleton, "config", None))
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


Region = tuple[int | slice, ...]


def regions(transform: Any, sources: list[tuple[str, tuple[int, ...]]]) -> list[Region] | None:
    """Return where each source lies in the one tensor that a transform makes, side by side.

    Args:
        transform: See `NameTranslation.transform`.
        sources: Pattern and shape of everything that goes in, in order.

    Returns:
        An index into the result per source; None for a transform that does more than stack and
        concatenate.
    """
    kinds = [type(operation) for operation in transform.operations]
    if kinds not in ([MergeModulelist], [Concatenate], [MergeModulelist, Concatenate]):
        return None
    along = {type(operation): operation.dim for operation in transform.operations}
    if min(along.values()) < 0:
        return None  # counted from the end, which stacking moves
    stacked = MergeModulelist in along
    found: dict[int, Region] = {}
    offset = 0
    for pattern in transform.source_patterns:
        numbers = [i for i, (of, _) in enumerate(sources) if of == pattern]
        for position, number in enumerate(numbers):
            shape = list(sources[number][1])
            region: list[int | slice] = [slice(None)] * (len(shape) + stacked)
            if stacked:
                shape.insert(along[MergeModulelist], len(numbers))
                region[along[MergeModulelist]] = position
            if Concatenate in along and region[along[Concatenate]] == slice(None):
                size = shape[along[Concatenate]]
                region[along[Concatenate]] = slice(offset, offset + size)
                offset += 0 if stacked else size
            elif Concatenate in along:
                region[along[Concatenate]] = offset + position
            found[number] = tuple(region)
        if stacked and Concatenate in along and numbers:
            offset += shape[along[Concatenate]]
    return [found[number] for number in range(len(sources))]


def stored_form(skeleton: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names and in the shapes that `save_pretrained` writes.

    Args:
        skeleton: The whole model; it knows whether a checkpoint was read, and how.
        tensors: By the model's names; all that go into one stored tensor together.
    """
    if not isinstance(skeleton, PreTrainedModel):
        return dict(tensors)
    config = skeleton.config
    if config.model_type != type(config).model_type:
        # EXAONE is read as Llama and saved with a config of type Llama: its own names would not be
        # found again.
        return dict(tensors)
    return revert_weight_conversion(skeleton, tensors)  # type: ignore[no-any-return]


def ignored_names(skeleton: nn.Module) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return what `from_pretrained` does not miss, and what it overlooks in a checkpoint."""
    missing = set(getattr(skeleton, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = set(getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in skeleton.named_buffers()]
    # Older checkpoints have these, which are made from the config since.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    return _any_of(missing), _any_of(unexpected)


def float32_names(skeleton: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """Return which parameters stay float32 although the others are read as `dtype`."""
    if dtype is None or not isinstance(skeleton, PreTrainedModel):
        return None
    kept: dict[str, Any] = skeleton._get_dtype_plan(dtype)
    return _any_of({pattern.replace("*", ".*") for pattern in kept})


def copy_custom_code(skeleton: PreTrainedModel, folder: Path, config: PretrainedConfig) -> None:
    """Put the files that define a model of remote code beside its weights."""
    if skeleton.is_remote_code():
        custom_object_save(skeleton, folder, config=config)  # type: ignore[arg-type]


@contextmanager
def shapes_of_training() -> Iterator[None]:
    """Have what runs on fake tensors be of the shapes that it has in training.

    Whether a row holds several texts is told by the values of its positions: here it holds one, so
    that no mask is made where training makes none. Rows that are multiplied in groups, each with
    its expert's matrix, are multiplied with one expert's: that has the same shapes, in every dtype.
    """

    def one_expert(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return rows.to(weight.dtype) @ weight[0]

    changes: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
        (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        (moe, "_grouped_mm", one_expert),
    )
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, ours in changes:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(changes, before, strict=True):
            setattr(module, name, theirs)


def _any_of(patterns: set[str]) -> re.Pattern[str] | None:
    return (
        re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None
    )
