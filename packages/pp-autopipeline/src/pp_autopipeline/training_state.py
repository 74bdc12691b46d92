"""What one rank contributes to a checkpoint and takes from one, by global names.

- `model/NAME`: a parameter or persistent buffer of the whole model. One that is tied is there once,
  under the first of its names.
- `optimizer/NAME/state/...`, `optimizer/NAME/group`: what the optimizer has of that parameter, and
  the settings of its group.
- `scheduler`: the state of the learning rate schedulers, which all step alike.
- `random/RANK`: the random generators of a rank.
- `progress`: the step and the data position.

Everything is a tensor; plain values are packed into tensors of bytes.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pp_autopipeline.autopipeline import AutoPipeline
from pp_autopipeline.checks import warn_once
from pp_autopipeline.optimizer_state import (
    group_problems,
    optimized,
    read_optimizers,
    read_scheduler,
    set_optimizer,
    set_scheduler,
)
from pp_autopipeline.packing import pack, unpack
from pp_autopipeline.random_streams import read_random_streams, set_random_streams

logger = logging.getLogger(__name__)

SavedTensors = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of every tensor in a checkpoint."""


class TrainingState:
    """Modules, optimizers and schedulers of one rank.

    Args:
        pipeline: An `AutoPipeline` that is built, or this rank's modules, whose parameter names are
            those of the whole model.
        optimizer: Over all parameters, or several.
        scheduler: Of the learning rate, or one per optimizer, which step alike.
    """

    def __init__(
        self,
        pipeline: AutoPipeline | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
    ) -> None:
        if isinstance(pipeline, AutoPipeline):
            ties = pipeline._require().plan.ties
            first = {name: tie.names[0][1] for tie in ties for _, name in tie.names}
            parts = pipeline.parts
        else:
            parts, first = list(pipeline), {}
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        several = isinstance(scheduler, list | tuple)
        self.schedulers = list(scheduler) if several else [s for s in [scheduler] if s is not None]
        self._held: dict[str, list[torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._others: list[str] = []
        for part in parts:
            for name, value in part.state_dict(keep_vars=True).items():
                if not isinstance(value, torch.Tensor):
                    self._others.append(name)
                elif id(value) not in self._names:
                    self._names[id(value)] = first.get(name, name)
                    self._held.setdefault(self._names[id(value)], []).append(value)
        self._owns_nothing = not any(True for part in parts for _ in part.parameters())

    def problems(self) -> list[str]:
        """Return what keeps this rank from saving, or from loading anything."""
        problems = [
            f"{name} is no tensor: modules with extra state cannot be saved"
            for name in self._others
        ]
        empty = [name for name, held in self._held.items() if any(t.is_meta for t in held)]
        if empty:
            problems.append(
                f"{empty[0]} has no values yet ({len(empty)} such): call materialize() first"
            )
        strangers = sum(
            id(p) not in self._names
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )
        # A rank whose stages own nothing may give its optimizer something to hold.
        if strangers and not self._owns_nothing:
            problems.append(
                f"the optimizer has {strangers} parameters that the pipeline has not: make it from "
                "ap.parameters(), after materialize()"
            )
        return problems

    def read(self, step: int, data: Any, rank: int) -> dict[str, torch.Tensor]:
        """Return everything that this rank saves.

        Raises:
            ValueError: If a value among it cannot be saved.
        """
        tensors = {f"model/{name}": held[0].detach() for name, held in self._held.items()}
        tensors |= read_optimizers(self.optimizers, self._names)
        for scheduler in self.schedulers[:1]:
            tensors["scheduler"] = pack(read_scheduler(scheduler), "the scheduler's state")
        tensors[f"random/{rank}"] = pack(read_random_streams(), "the random generators' state")
        if rank == 0:
            position = data.state_dict() if hasattr(data, "state_dict") else data
            tensors["progress"] = pack({"step": step, "data": position}, "data")
        return tensors

    def claims(self) -> set[str]:
        """Return what this rank has to find in a checkpoint; see `claims_of`."""
        trained = optimized(self.optimizers, self._names)
        return {
            *(f"model/{name}" for name in self._held),
            *(f"optimizer/{name}" for name in trained),
            *(["scheduler"] if self.schedulers else []),
        }

    def misfits(self, saved: SavedTensors) -> list[str]:
        """Return which of this rank's tensors are others in a checkpoint."""
        problems = []
        for name, (tensor, *_) in self._held.items():
            shape, dtype = saved.get(f"model/{name}", (tensor.shape, tensor.dtype))
            if shape != tensor.shape:
                problems.append(
                    f"{name} has shape {list(shape)} in the checkpoint and {list(tensor.shape)} here"
                )
            elif dtype != tensor.dtype:
                problems.append(f"{name} is {dtype} in the checkpoint and {tensor.dtype} here")
        return problems

    def packed_targets(self, saved: SavedTensors, rank: int) -> dict[str, torch.Tensor]:
        """Return tensors to read this rank's packed values into."""
        trained = optimized(self.optimizers, self._names)
        keys = [
            "progress",
            "scheduler",
            f"random/{rank}",
            *(f"optimizer/{n}/group" for n in trained),
        ]
        return {
            key: torch.empty(*saved[key][:1], dtype=saved[key][1]) for key in keys if key in saved
        }

    def group_problems(self, packed: Mapping[str, torch.Tensor]) -> list[str]:
        """Return why this rank's optimizers cannot go on from what was saved."""
        return group_problems(self.optimizers, self._names, _saved_groups(packed))

    def targets(self, saved: SavedTensors) -> dict[str, torch.Tensor]:
        """Return tensors to read into: this rank's own, and new ones for the optimizers' state."""
        tensors = {f"model/{name}": held[0].detach() for name, held in self._held.items()}
        trained = optimized(self.optimizers, self._names)
        for key, (shape, dtype) in saved.items():
            kind, _, rest = key.partition("/")
            name, _, inner = rest.partition("/")
            if kind == "optimizer" and name in trained and inner.startswith("state/"):
                parameter = trained[name].detach()
                if shape and shape == parameter.shape:  # sharded as it is
                    tensors[key] = torch.empty_like(parameter, dtype=dtype)
                else:  # a count of steps stays on the CPU, unless the optimizer moves it
                    device = parameter.device if shape else "cpu"
                    tensors[key] = torch.empty(shape, dtype=dtype, device=device)
        return tensors

    @torch.no_grad()
    def set(
        self, packed: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], rank: int
    ) -> tuple[int, Any]:
        """Go on from what was read into the targets; return step and data position."""
        for first, *others in self._held.values():
            for other in others:
                other.copy_(first)
        states: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer/"):
                _, name, _, state = key.split("/", 3)
                states.setdefault(name, {})[state] = tensor
        for optimizer in self.optimizers:
            set_optimizer(optimizer, self._names, _saved_groups(packed), states)
        for scheduler in self.schedulers:
            set_scheduler(scheduler, unpack(packed["scheduler"]))
        if f"random/{rank}" in packed:
            set_random_streams(unpack(packed[f"random/{rank}"]))
        else:
            warn_once(
                logger,
                "the checkpoint was saved by fewer ranks and has no random streams for this one, "
                "which goes on with those it has",
            )
        progress = unpack(packed["progress"])
        return progress["step"], progress["data"]


def claims_of(saved: SavedTensors) -> set[str]:
    """Return what is in a checkpoint: its `model/NAME`, `optimizer/NAME`, `scheduler`."""
    kept = (key for key in saved if key.partition("/")[0] in ("model", "optimizer", "scheduler"))
    return {"/".join(key.split("/")[:2]) for key in kept}


def claim_problems(wanted: set[str], saved: set[str]) -> list[str]:
    """Return what differs between the claims of all ranks and those of a checkpoint."""
    problems = []
    for claims, where in ((wanted - saved, "here"), (saved - wanted, "in the checkpoint")):
        for claim in sorted(claims):
            kind, _, name = claim.partition("/")
            if kind == "model":
                problems.append(f"{name} is only {where}")
            elif kind == "scheduler":
                problems.append(f"a scheduler is only {where}")
            elif f"model/{name}" in wanted & saved:
                problems.append(f"{name} is in an optimizer only {where}")
    return problems


def _saved_groups(packed: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        key.split("/")[1]: unpack(tensor)
        for key, tensor in packed.items()
        if key.startswith("optimizer/")
    }
