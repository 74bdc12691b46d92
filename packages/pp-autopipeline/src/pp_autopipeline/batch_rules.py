"""What a batch for one model must be like, checked on every rank before anything is sent."""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pp_autopipeline.images import ImageRules
from pp_autopipeline.loss_probe import IGNORED, TargetKind
from pp_autopipeline.parts import learned_positions
from pp_autopipeline.pipeline import output_shape
from pp_split_hf import ModelLayout

# What a stage cannot take: the loss is computed outside of the model, and there is no cache.
_REFUSED = {
    "labels": "give the labels as target=, aligned with the logits",
    "inputs_embeds": "give input_ids",
    "past_key_values": "a pipeline keeps no cache",
    "cache": "a pipeline keeps no cache",
}


@dataclass(frozen=True)
class BatchRules:
    """Limits that follow from a model."""

    vocab_size: int | None
    """Ids must be below; None if the model does not tell."""
    num_classes: int
    """Size of the last dim of what the model returns; labels must be below, if it has a head."""
    has_head: bool
    """Whether that are classes, and not hidden states."""
    target_kind: TargetKind
    """What a target says, as far as the model's output tells."""
    max_positions: int | None
    """The longest sequence, for models that learn a vector per position."""
    keywords: frozenset[str]
    """Names of the arguments of its forward."""
    images: ImageRules | None = None
    """How its images are found; None if it takes text alone."""

    @classmethod
    def of(cls, model: nn.Module, layout: ModelLayout) -> "BatchRules":
        """Return the rules for a model."""
        config: Any = getattr(model, "config", None)
        images = ImageRules.of(config)
        config = config.get_text_config(decoder=True) if config is not None else None
        output = output_shape(layout)
        decoder = model.get_submodule(layout.layers.rpartition(".")[0])
        names = {
            name
            for module in (model, decoder)
            for name, parameter in inspect.signature(type(module).forward).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        return cls(
            getattr(config, "vocab_size", None),
            output.dims[-1].offset,
            bool(layout.heads),
            _target_kind(len(output.dims), names),
            learned_positions(model, layout),
            frozenset(names - {"self"}),
            images,
        )

    def problems(
        self, input_ids: torch.Tensor, target: torch.Tensor | None, kwargs: Mapping[str, Any]
    ) -> list[str]:
        """Return what is wrong with a batch, in the caller's names.

        Values are looked at only where that waits for no device.
        """
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
            tensor = isinstance(input_ids, torch.Tensor)
            found = f"shape {tuple(input_ids.shape)}" if tensor else f"type {type(input_ids)}"
            return [f"input_ids has {found}, not [rows, length]"]
        problems = []
        if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            problems.append(f"input_ids has dtype {input_ids.dtype}; token ids are integers")
        else:
            problems += _range_problems("input_ids", input_ids, self.vocab_size, None)
        if self.max_positions is not None and input_ids.shape[1] > self.max_positions:
            problems.append(
                f"input_ids has length {input_ids.shape[1]}, the model {self.max_positions} "
                "positions"
            )
        if target is not None:
            problems += self._target_problems(input_ids, target)
        return problems + self._keyword_problems(kwargs)

    def _target_problems(self, input_ids: torch.Tensor, target: torch.Tensor) -> list[str]:
        shape, length = tuple(target.shape), input_ids.shape[1]
        if target.shape[:1] != input_ids.shape[:1]:
            return [
                f"target has shape {shape}, input_ids {tuple(input_ids.shape)}: they must have the "
                "same rows and length"
            ]
        if target.is_floating_point():
            return []
        if self.target_kind == "tokens":
            if target.ndim >= 2 and target.shape[1] != length:
                return [
                    f"target has shape {shape}, input_ids {tuple(input_ids.shape)}: they must have "
                    "the same rows and length"
                ]
            limit = self.num_classes if self.has_head and target.ndim == 2 else None
            return _range_problems("target", target, limit, IGNORED)
        if self.target_kind == "rows":
            if target.shape[1:] not in ((), (self.num_classes,)):
                return [
                    f"target has shape {shape}, and the model gives {self.num_classes} numbers per "
                    f"row: the target is [rows], or [rows, {self.num_classes}]"
                ]
            limit = self.num_classes if target.ndim == 1 and self.num_classes > 1 else None
            return _range_problems("target", target, limit, IGNORED)
        if shape[1:] != (2,):
            return [
                f"target has shape {shape}, and the model finds a span in each row: the target is "
                "[rows, 2], start and end"
            ]
        return _range_problems("target", target, length, IGNORED)

    def _keyword_problems(self, kwargs: Mapping[str, Any]) -> list[str]:
        problems = []
        for name, value in kwargs.items():
            if name in _REFUSED and value is not None:
                problems.append(f"{name} cannot be given to a pipeline: {_REFUSED[name]}")
            elif name not in self.keywords:
                near = difflib.get_close_matches(name, self.keywords, n=1, cutoff=0.85)
                if near:
                    problems.append(f"the model takes no {name}: did you mean {near[0]}?")
        return problems


def _target_kind(num_dims: int, keywords: set[str]) -> TargetKind:
    if "start_positions" in keywords:  # Transformers' name for the target of question answering
        return "spans"
    return "rows" if num_dims == 2 else "tokens"


def _range_problems(
    name: str, values: torch.Tensor, limit: int | None, ignored: int | None
) -> list[str]:
    if limit is None or values.device.type != "cpu" or values.numel() == 0:
        return []
    if ignored is not None:
        values = values[values != ignored]
        if values.numel() == 0:
            return []
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high < limit:
        return []
    also = f", or {ignored} for what does not count" if ignored is not None else ""
    return [f"{name} has values from {low} to {high}; the model takes 0 to {limit - 1}{also}"]
