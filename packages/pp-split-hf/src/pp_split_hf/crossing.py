"""What must cross each boundary between layers, so that any stage can go on from it.

A boundary lies at the first call of a layer; calls from there on are late, those before are
early. A tensor that a late call is given and that depends on early work has to cross: it is a
slot of the boundary. What depends on late work alone is made anew behind the boundary by the
architecture's own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pp_split_hf.flow import Edge, Flow, Path, Sources
from pp_split_hf.torch_private import autograd_edge


@dataclass(frozen=True)
class Place:
    """Where a call reads a tensor."""

    fqn: str
    """The module that is called."""
    call: int
    """Which of its calls in one forward, 0 for the first."""
    path: Path
    """From its arguments to the tensor."""


@dataclass(frozen=True)
class Slot:
    """One tensor that crosses a boundary."""

    shape: Any
    """Its `BoundaryShape`."""
    places: tuple[Place, ...]
    """Where it is read behind the boundary; a sending stage takes it from the first. None for what
    leaves the last layer."""
    in_place: bool = False
    """Whether code between two layers goes on with it, so that it must be put into the very tensor
    which that code holds."""


@dataclass(frozen=True)
class Crossing:
    """All that crosses one boundary."""

    slots: tuple[Slot, ...]
    """In the order in which they are sent, the hidden states first."""
    problem: str | None = None
    """Why the model cannot be cut here."""


@dataclass
class _Draft:
    """A slot in the making."""

    tensor: torch.Tensor
    places: list[Place]
    in_place: bool = False


class Cut:
    """One boundary of a traced model.

    Args:
        flow: Of the traced forward.
        layers: FQNs of all layers, in the order of the model.
        boundary: Index of the layer before which it lies, or the number of layers.
        late_parameters: Parameters that the last stage has.
        units: Other modules with parameters, each of which one stage has.
        hidden: Path of the hidden states among the arguments of each layer's call, and the tensor
            that leaves the last layer.
    """

    def __init__(
        self,
        flow: Flow,
        layers: Sequence[str],
        boundary: int,
        late_parameters: frozenset[str],
        units: frozenset[str],
        hidden: tuple[Path, torch.Tensor],
    ) -> None:
        self.flow = flow
        self.late_parameters = late_parameters
        number = {fqn: i for i, fqn in enumerate(layers)}
        at = [number.get(call.fqn, -1) for call in flow.calls]
        self.boundary = boundary
        self.layers_run = [(i, n) for i, n in enumerate(at) if n >= 0]
        behind = [i for i, n in self.layers_run if n >= boundary]
        before = [i for i, n in self.layers_run if n < boundary]
        self.at_end = not behind
        self.start = before[-1] + 1 if self.at_end else behind[0]
        self.last_before = before[-1] if before else -1
        self.hidden_path, self.exit = hidden
        runs_before = {call.fqn for call in flow.calls[: self.start]}
        runs_behind = {call.fqn for call in flow.calls[self.start :]}
        self.on_both_sides = sorted(units & runs_before & runs_behind)
        self.drafts: list[_Draft] = []
        self.stops: dict[Edge | int, int] = {}

    def crossing(self) -> Crossing:
        """Return what crosses; the slots' shapes are still the traced tensors themselves."""
        if self.last_before > self.start:
            return Crossing(
                (), f"layer {self.boundary - 1} runs again after layer {self.boundary} has run"
            )
        if self.on_both_sides:
            return Crossing((), f"{', '.join(self.on_both_sides)} runs on both sides")
        self._add_hidden()
        for index in range(self.start, len(self.flow.calls)):
            for path, tensor in self.flow.calls[index].leaves:
                if problem := self._look_at(index, path, tensor):
                    return Crossing((), problem)
        slots = tuple(Slot(d.tensor, tuple(d.places), d.in_place) for d in self.drafts)
        return Crossing(slots)

    def _add_hidden(self) -> None:
        """The hidden states, and whatever else the call at the boundary is given from before."""
        if self.at_end:
            self._slot(self.exit)
            return
        call = self.flow.calls[self.start]
        leaves = sorted(call.leaves, key=lambda leaf: leaf[0] != self.hidden_path)
        for path, tensor in leaves:
            sources = self.flow.sources(self.start, path)
            if path == self.hidden_path or self._early(sources):
                self._slot(tensor).places.append(Place(call.fqn, call.number, path))

    def _look_at(self, index: int, path: Path, tensor: torch.Tensor) -> str | None:
        """Make sure that one tensor of a late call is right behind the boundary."""
        sources = self.flow.sources(index, path)
        if not self._early(sources):
            return None
        number = self._number(tensor)
        call = self.flow.calls[index]
        place = Place(call.fqn, call.number, path)
        if number is not None:
            if place not in self.drafts[number].places and not (self.at_end and number == 0):
                self.drafts[number].places.append(place)
            return None
        behind = self.flow.trace_back(tensor, self.stops)
        early, late = self._early(behind), any(i >= self.start for i in behind.calls)
        if (early and late) or (early and call.fqn == ""):
            return self._mixed(index, path)
        if not early and (late or self.at_end):
            for stop in behind.stops:
                self.drafts[stop].in_place = not (self.at_end and stop == 0)
            return None
        self._slot(tensor).places.append(place)
        return None

    def _mixed(self, index: int, path: Path) -> str:
        call = self.flow.calls[index]
        what = f"argument {path[0][0]!r} of {call.fqn}" if call.fqn else "the output"
        return (
            f"{what} is computed from work on both sides of the boundary, by code of the model "
            "that no stage runs alone"
        )

    def _early(self, sources: Sources) -> bool:
        return bool(sources.parameters - self.late_parameters) or any(
            i < self.start for i in sources.calls
        )

    def _number(self, tensor: torch.Tensor) -> int | None:
        return self.stops.get(autograd_edge(tensor) if tensor.requires_grad else id(tensor))

    def _slot(self, tensor: torch.Tensor) -> _Draft:
        number = self._number(tensor)
        if number is None:
            key = autograd_edge(tensor) if tensor.requires_grad else id(tensor)
            number = self.stops[key] = len(self.drafts)
            self.drafts.append(_Draft(tensor, []))
        return self.drafts[number]
