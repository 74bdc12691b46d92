"""In which dtype each parameter is, when a whole model is to be in one."""

from collections.abc import Iterator

import torch
from torch import nn

from pp_split_hf.transformers_private import float32_names


def cast_dtypes(
    model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[str, nn.Parameter, torch.dtype]]:
    """Yield every parameter with its name and the dtype that it gets.

    As in `from_pretrained`, `dtype` is not for integers, nor for what the architecture keeps in
    float32.

    Args:
        model: A whole model, or a stage of one.
        dtype: What the model is to be in; None means that parameters keep theirs.
    """
    kept = float32_names(model, dtype)
    for name, parameter in model.named_parameters():
        if dtype is None or not parameter.is_floating_point():
            yield name, parameter, parameter.dtype
        else:
            yield name, parameter, torch.float32 if kept and kept.search(name) else dtype
