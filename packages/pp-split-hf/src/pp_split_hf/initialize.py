"""Weights of a stage made from nothing, the same whatever the split."""

import zlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from pp_split_hf.torch_private import replace_tensors, set_parameter


@torch.no_grad()
def initialize_stage_weights(
    part: nn.Module,
    device: torch.device | str | int,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> None:
    """Give a stage's meta parameters memory on `device` and the values its architecture starts with.

    Values come from the model's own `_init_weights`, module by module (Transformers 5.23), each
    with a random stream of its own that depends on `seed` and the module's name alone: any number
    of ranks and any split give the same weights. Tensors that are not on the meta device are moved
    to `device` and keep their values. Every rank may call it for its own parts; nothing is sent.

    Args:
        part: A stage's module, or a whole model.
        device: Where the weights are to be.
        dtype: Of floating point parameters; None keeps theirs. Buffers always keep theirs.
        seed: Same seed, same weights.
    """
    empty = {
        name
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
        if tensor.device.type == "meta"
    }
    place_stage(part, device, dtype)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), guard_torch_init_functions():
        for fqn, module, model in _modules_children_first(part):
            names = [name for name, _ in module.named_parameters(prefix=fqn)]
            names += [name for name, _ in module.named_buffers(prefix=fqn)]
            if any(name in empty for name in names) and all(
                name in empty for name, _ in module.named_parameters(prefix=fqn)
            ):
                torch.manual_seed(zlib.crc32(f"{seed}:{fqn}".encode()))
                model._init_weights(module)


def place_stage(
    part: nn.Module, device: torch.device | str | int, dtype: torch.dtype | None
) -> None:
    """Put a stage's tensors on a device; meta ones get memory without values."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        cast = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else None
        if tensor.device.type == "meta":
            return torch.empty_like(tensor, device=device, dtype=cast or tensor.dtype)
        return tensor.to(device=device, dtype=cast or tensor.dtype)

    shared = _shared_names(part)
    replace_tensors(part, place)
    for first, *others in shared:
        parameter = part.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            set_parameter(part.get_submodule(owner), name, parameter)


def _shared_names(part: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _modules_children_first(
    part: nn.Module, fqn: str = "", model: PreTrainedModel | None = None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield each module with its name and the model whose rules initialise it."""
    if isinstance(part, PreTrainedModel):
        model = part
    for name, child in part.named_children():
        yield from _modules_children_first(child, f"{fqn}.{name}" if fqn else name, model)
    if model is not None:
        yield fqn, part, model
