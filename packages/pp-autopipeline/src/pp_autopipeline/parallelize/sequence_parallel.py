"""Sequence parallelism: between what tensor parallelism shares, ranks share the sequence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pp_autopipeline.parallelize.shared_gradients import sum_gradients
from pp_split_hf import stage_part

_SEQUENCE = Shard(1)


@dataclass
class Sequence:
    """The sequence that a stage is at, which the ranks of an axis share."""

    mesh: DeviceMesh
    """The axis."""
    length: int = 0
    """Tokens per row, of all ranks."""

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens; the gradient is gathered."""
        self.length = whole.shape[1]
        spread = DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        return spread.redistribute(placements=[_SEQUENCE]).to_local()

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return all tokens; each rank takes its own part of the gradient, which all have whole."""
        shape = torch.Size((mine.shape[0], self.length, *mine.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(
            mine, self.mesh, [_SEQUENCE], run_check=False, shape=shape, stride=stride
        )
        whole: torch.Tensor = spread.redistribute(placements=[Replicate()]).to_local()
        return whole


def apply_sp(part: nn.Module, mesh: DeviceMesh, regions: list[str]) -> None:
    """Have a stage's decoder layers share the sequence outside of what ranks share otherwise.

    Each rank has its tokens alone from the first layer of the stage to the last, but for the
    regions, attention, MLP and whatever else is no norm: those get all tokens, and each rank takes
    its own of what they return. So norms and residuals are computed once instead of on every rank,
    and kept for the backward once. Any length will do, also one that the ranks do not divide.

    Args:
        part: The stage's module, its matrices shared already.
        mesh: The tensor-parallel axis.
        regions: Names of the layers' children other than norms.
    """
    stage = stage_part(part)
    assert stage is not None
    layers = [f for f in stage.layout.layer_fqns if any(r.startswith(f"{f}.") for r in regions)]
    if not layers:
        return
    sequence = Sequence(mesh)
    for name in regions:
        wrap_hidden_states(part.get_submodule(name), sequence.gather, sequence.scatter)
    for layer in layers:
        for name, module in part.get_submodule(layer).named_modules(prefix=layer):
            inside = any(name == r or name.startswith(f"{r}.") for r in regions)
            if not inside and any(True for _ in module.parameters(recurse=False)):
                sum_gradients(module, mesh)
    wrap_hidden_states(part.get_submodule(layers[0]), sequence.scatter, None)
    wrap_hidden_states(part.get_submodule(layers[-1]), None, sequence.gather)


_Change = Callable[[torch.Tensor], torch.Tensor]


def wrap_hidden_states(module: nn.Module, before: _Change | None, after: _Change | None) -> None:
    """Change the hidden states that enter and leave a module."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = _change_input(before, args, kwargs)
        output = forward(*args, **kwargs)
        if after is None:
            return output
        if isinstance(output, torch.Tensor):
            return after(output)
        return type(output)((after(output[0]), *output[1:]))

    object.__setattr__(module, "forward", run)


def _change_input(
    change: _Change, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), dict(kwargs)
    if "hidden_states" not in kwargs:
        raise TypeError(
            "sequence parallelism finds no hidden states: a layer's child was called with the "
            f"keywords {sorted(kwargs)} and no positional argument. Set sequence_parallel=False"
        )
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
