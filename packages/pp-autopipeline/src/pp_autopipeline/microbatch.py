"""Which dim of each argument is the batch."""

from collections.abc import Mapping
from typing import Any

import torch


def find_batch_dims(
    kwargs: Mapping[str, Any], batch_size: int, seq_len: int
) -> dict[str, int | None]:
    """Return for each keyword argument the dim to cut into microbatches, or None to share it.

    A tensor is cut along dim 0 if that has the batch's size; `position_ids` of three dims are cut
    along dim 1, as Transformers' multimodal models have them (`[3, B, S]`). Shared are tensors
    that broadcast over the batch (`[1, ...]`, `[S]`, scalars) and everything that is no tensor.

    Raises:
        ValueError: Naming every argument for which neither holds, or both could, and containers
            that hold tensors.
    """
    dims: dict[str, int | None] = {}
    problems = []
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor):
            dims[name] = None
            if _holds_tensors(value):
                problems.append(
                    f"{name} is a {type(value).__name__} that holds tensors, which cannot be cut: "
                    "pass tensors themselves (masks are made from attention_mask on every stage)"
                )
            continue
        shape = tuple(value.shape)
        if shape == (seq_len,) and seq_len == batch_size and batch_size > 1:
            problems.append(
                f"{name} has shape {shape}, which could be one value per row or per position "
                f"(batch size and sequence length are both {seq_len}): give it a batch dim"
            )
        elif name == "position_ids" and len(shape) == 3 and shape[1] == batch_size:
            dims[name] = 1
        elif shape and shape[0] == batch_size:
            dims[name] = 0
        elif not shape or shape[0] == 1 or shape == (seq_len,):
            dims[name] = None
        else:
            problems.append(f"{name} has shape {shape}, whose first dim is not the batch's")
    if problems:
        raise ValueError(
            f"cannot cut keyword arguments for input_ids of shape {(batch_size, seq_len)}: "
            + "; ".join(problems)
        )
    return dims


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(each) for each in value)
    return isinstance(value, torch.Tensor)
