"""Weights of a stage made from nothing, the same whatever the split."""

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from pp_split_hf.dtypes import cast_dtypes
from pp_split_hf.prune import stage_part
from pp_split_hf.torch_private import (
    local_region,
    replace_buffers,
    replace_parameters,
    replace_tensors,
    set_parameter,
)


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
        dtype: Of floating point parameters, but for those that the architecture keeps in float32;
            None keeps theirs. Buffers always keep theirs.
        seed: Same seed, same weights.

    Raises:
        ValueError: If only some parameters of a module are on the meta device, or if a buffer is
            that the model's own initialisation does not fill.
    """
    empty = {
        name
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
        if tensor.device.type == "meta"
    }
    wanted = [
        (fqn, module, model)
        for fqn, module, model in _modules_children_first(part)
        if empty.intersection(_tensor_names(fqn, module))
        and empty.issuperset(name for name, _ in module.named_parameters(prefix=fqn))
    ]
    reached = {name for fqn, module, _ in wanted for name in _tensor_names(fqn, module)}
    if left := sorted(empty - reached):
        raise ValueError(
            f"{', '.join(left[:10])}{' and more' if len(left) > 10 else ''} have no values, but "
            "other parameters of the same module have: give all of a module's parameters values, "
            "or none"
        )
    place_stage(part, device, dtype)
    tables = {name: _mark(b) for name, b in part.named_buffers() if name in empty}
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), guard_torch_init_functions():
        done: set[int] = set()
        for fqn, module, model in wanted:
            own = {id(parameter) for parameter in module.parameters(recurse=False)}
            if own and own <= done:
                continue  # a tied weight has the values of its first module
            torch.manual_seed(zlib.crc32(f"{seed}:{fqn}".encode()))
            with _whole_parameters(module):
                model._init_weights(module)
            done |= own
    for name, table in tables.items():
        _check_filled(name, table)


@contextmanager
def _whole_parameters(module: nn.Module) -> Iterator[None]:
    """Have a module's sharded parameters whole, one module at a time; then keep this rank's shards."""
    shards = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    own = vars(module)["_parameters"]
    for name, shard in shards.items():
        device = shard.to_local().device
        own[name] = nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device=device))
    try:
        yield
    finally:
        for name, shard in shards.items():
            shard.to_local().copy_(own[name][local_region(shard)])
            own[name] = shard


@torch.no_grad()
def allocate_stage_weights(
    part: nn.Module, device: torch.device | str | int, dtype: torch.dtype | None = None
) -> None:
    """Give a stage's meta parameters memory on `device` and no values: to be filled from elsewhere.

    Args:
        part: A stage's module; see `split_model_into_stages`.
        device: Where the weights are to be.
        dtype: As for `initialize_stage_weights`.
    """
    known = stage_part(part)
    if known is not None:
        initialize_buffers(part, known.skeleton, device)
    place_stage(part, device, dtype)


@torch.no_grad()
def initialize_buffers(
    part: nn.Module, skeleton: nn.Module, device: torch.device | str | int
) -> None:
    """Give tables that are in no checkpoint and on the meta device their values, on `device`.

    Parameters are left as they are, with values or without.

    Args:
        part: A stage's module.
        skeleton: The whole model on the meta device.
        device: Where the tables are to be.

    Raises:
        ValueError: If the model's own initialisation does not fill one.
    """
    stored = part.state_dict().keys()
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), guard_torch_init_functions():
        for fqn, module, model in _modules_children_first(part):
            named = dict(module.named_buffers(prefix=fqn, recurse=False))
            empty = [n for n, b in named.items() if b.device.type == "meta" and n not in stored]
            if not empty:
                continue
            # The model's rules fill parameters too: here they have those of a copy on meta.
            double = copy.deepcopy(skeleton.get_submodule(fqn))
            for name in empty:
                table = torch.empty_like(named[name], device=device)
                setattr(double, name.rpartition(".")[2], _mark(table))
            model._init_weights(double)
            for name in empty:
                attribute = name.rpartition(".")[2]
                table = getattr(double, attribute)
                _check_filled(name, table)
                setattr(module, attribute, table)


def move_stages(
    parts: Sequence[nn.Module], device: torch.device | str | int, dtype: torch.dtype | None = None
) -> None:
    """Put the tensors of stages on a device, without changing the model they share them with.

    A tensor that is there already stays the one it is; another is replaced by a new one in the
    stages alone. Meta tensors stay; `initialize_stage_weights` gives them memory.

    Args:
        parts: Modules of one rank's stages; what two of them share stays shared.
        device: Where its tensors are to be.
        dtype: Of floating point parameters, but for those that the architecture keeps in float32;
            None keeps theirs. Buffers always keep theirs.
    """
    moved: dict[int, nn.Parameter] = {}
    dtypes = {id(p): cast for part in parts for _, p, cast in cast_dtypes(part, dtype)}

    def move(parameter: nn.Parameter) -> nn.Parameter:
        cast = dtypes[id(parameter)]
        there = device if parameter.device.type != "meta" else "meta"
        data = parameter.detach().to(device=there, dtype=cast)
        if data.device == parameter.device and data.dtype == parameter.dtype:
            return parameter
        if id(parameter) not in moved:  # one that two modules share stays one
            moved[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        return moved[id(parameter)]

    for part in parts:
        replace_parameters(part, move)
        replace_buffers(part, lambda b: b if b.device.type == "meta" else b.to(device))


def place_stage(
    part: nn.Module, device: torch.device | str | int, dtype: torch.dtype | None
) -> None:
    """Put a stage's tensors on a device; meta ones get memory without values."""
    dtypes = {id(parameter): cast for _, parameter, cast in cast_dtypes(part, dtype)}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        cast = dtypes.get(id(tensor), tensor.dtype)
        if tensor.device.type == "meta":
            return torch.empty_like(tensor, device=device, dtype=cast)
        return tensor.to(device=device, dtype=cast)

    shared = _shared_names(part)
    replace_tensors(part, place)
    for first, *others in shared:
        parameter = part.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            set_parameter(part.get_submodule(owner), name, parameter)


def _mark(table: torch.Tensor) -> torch.Tensor:
    """Fill a table with what no architecture fills one with, and return it."""
    if table.is_floating_point():
        return table.fill_(torch.nan)
    return table if table.dtype == torch.bool else table.fill_(torch.iinfo(table.dtype).min)


def _check_filled(name: str, table: torch.Tensor) -> None:
    if table.numel() == 0 or table.dtype == torch.bool:
        return
    lowest = None if table.is_floating_point() else torch.iinfo(table.dtype).min
    if bool((table.isnan() if lowest is None else table == lowest).all()):
        raise ValueError(
            f"{name} is on the meta device and the architecture's own initialisation does not fill "
            "it: build the model under init_empty_weights(), which keeps buffers real"
        )


def _shared_names(part: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tensor_names(fqn: str, module: nn.Module) -> set[str]:
    """Names of all parameters and buffers in a module."""
    named = (*module.named_parameters(prefix=fqn), *module.named_buffers(prefix=fqn))
    return {name for name, _ in named}


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
