"""One parameter on several stages, such as an embedding that is also the head: kept one.

Every rank that holds such a parameter has a replica. Replicas stay equal because they start equal
and get equal gradients: what each stage contributes is summed over the ranks that hold one.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pp_split_hf.layout import ModelLayout
from pp_split_hf.torch_private import set_parameter


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages hold."""

    names: tuple[tuple[int, str], ...]
    """Stage and FQN of every place where it is, in the order of the model."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it, ascending."""
        return tuple(sorted({stage for stage, _ in self.names}))


def find_ties(
    model: nn.Module, layout: ModelLayout, stage_fqns: Sequence[Sequence[str]]
) -> tuple[Tie, ...]:
    """Return the parameters that a plan puts on more than one stage.

    They are found by identity, whatever the config says, so a tie made by hand is one too.
    """
    stage_of = {
        fqn: stage
        for stage, names in enumerate(stage_fqns)
        for fqn in names
        if fqn not in layout.shared
    }
    places: dict[int, list[tuple[int, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((fqn for fqn in stage_of if name.startswith(f"{fqn}.")), None)
        if owner is not None:
            places.setdefault(id(parameter), []).append((stage_of[owner], name))
    ties = (Tie(tuple(names)) for names in places.values())
    return tuple(tie for tie in ties if len(tie.stages) > 1)


class TiedParameters:
    """The tied parameters of one rank.

    Args:
        ties: Of the whole pipeline; see `find_ties`.
        parts: This rank's stage modules by stage index.
        rank_of_stage: The pipeline rank of every stage.
        group: Process group of the pipeline.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        parts: Mapping[int, nn.Module],
        rank_of_stage: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._parts = parts
        self._local = [
            names for tie in ties if (names := [place for place in tie.names if place[0] in parts])
        ]
        self._ranks = [
            sorted({rank_of_stage[stage] for stage in tie.stages})
            for tie in ties
            if any(stage in parts for stage in tie.stages)
        ]
        self._groups: list[dist.ProcessGroup | None] | None = None
        self._pending = False
        self.reshare()
        if self.across_ranks:
            for part in parts.values():
                part.register_forward_pre_hook(self._note_forward)
        if self._local:
            _guard(self)

    @property
    def across_ranks(self) -> bool:
        """Whether another rank holds a replica of one of this rank's parameters."""
        return any(len(ranks) > 1 for ranks in self._ranks)

    def reshare(self) -> None:
        """Make what is one parameter one again on this rank, and mark replicas.

        To be called after parameters were replaced, as materialising meta parameters does. A
        replica has the attribute `pp_replica`: it is clipped with the others but does not count
        in the norm, since the rank of its first stage counts it.
        """
        rank = dist.get_rank(self._group)
        for names, ranks in zip(self._local, self._ranks, strict=True):
            (stage, first), *others = names
            parameter = self._parts[stage].get_parameter(first)
            for stage, name in others:
                owner, _, attribute = name.rpartition(".")
                set_parameter(self._parts[stage].get_submodule(owner), attribute, parameter)
            if ranks[0] != rank:
                parameter.pp_replica = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every replica the values of the first; every rank calls it."""
        for parameter, ranks, group in self._over_ranks():
            source = dist.get_global_rank(self._group, ranks[0])
            dist.broadcast(_local(parameter), source, group=group)

    @torch.no_grad()
    def sync(self) -> None:
        """Sum the gradients of all replicas; every rank calls it once per optimizer step.

        For loops that call a bare schedule. Only what was accumulated since the last call may be
        there: calling it twice would count the first sum twice.
        """
        for parameter, _, group in self._over_ranks():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(_local(parameter.grad), group=group)
        self._pending = False

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum over replicas what is added to gradients inside; what was there before stays."""
        parameters = [parameter for parameter, _, _ in self._over_ranks()]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        self.sync()
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad = gradient.add_(parameter.grad)

    def check(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer would step twice, or on gradients that are not summed.

        Raises:
            RuntimeError: Saying what to call.
        """
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        for (stage, name), *_ in self._local:
            if held.count(id(self._parts[stage].get_parameter(name))) > 1:
                raise RuntimeError(
                    f"{name} is tied over two stages of this rank and is in the optimizer twice, so "
                    "each step would move it twice: give the optimizer ap.parameters(), or each "
                    "parameter once"
                )
        if not self._pending:
            return
        tied = {
            id(parameter) for parameter, _, _ in self._over_ranks() if parameter.grad is not None
        }
        for group in optimizer.param_groups:
            if any(id(parameter) in tied for parameter in group["params"]):
                raise RuntimeError(
                    "the gradients of parameters that are tied over pipeline stages are not "
                    "summed, and the replicas would drift apart: train with AutoPipeline.step, or "
                    "call sync_tied_gradients() on every rank before the optimizer's step"
                )

    def _over_ranks(self) -> Iterator[tuple[nn.Parameter, list[int], dist.ProcessGroup]]:
        if self._groups is None:
            # Only the ranks that hold a replica make its group, all of them in the same order.
            groups: list[Any] = [
                dist.new_group(
                    [dist.get_global_rank(self._group, rank) for rank in ranks],
                    use_local_synchronization=True,
                )
                if len(ranks) > 1
                else None
                for ranks in self._ranks
            ]
            self._groups = groups
        for names, ranks, group in zip(self._local, self._ranks, self._groups, strict=True):
            if group is not None:
                stage, name = names[0]
                yield self._parts[stage].get_parameter(name), ranks, group

    def _note_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._pending = True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _guard(tied: TiedParameters) -> None:
    """Have every optimizer ask before it steps, for as long as `tied` is in use."""
    reference = weakref.ref(tied)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive.check(optimizer)

    weakref.finalize(tied, register_optimizer_step_pre_hook(hook).remove)
