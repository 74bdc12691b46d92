"""What comes from where in one traced forward, read from its autograd graph."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pp_split_hf.torch_private import autograd_edge, sequence_number

Step = tuple[str | int, int | None]
"""A key or an index, and beside an index into a tuple or list its length."""
Path = tuple[Step, ...]
"""From a call's arguments to a tensor: the argument's index or name first, then steps inside."""
Edge = tuple[Any, int]


@dataclass
class Call:
    """One call of a module that is watched; the last one, of no module, stands for the output."""

    fqn: str
    """The module."""
    number: int
    """Which of its calls in this forward, 0 for the first."""
    begin: int
    """Sequence number of autograd when it began."""
    end: int = 0
    """The same when it ended."""
    leaves: list[tuple[Path, torch.Tensor]] = field(default_factory=list)
    """The tensors it was given."""
    output: Any = None
    """What it returned."""


@dataclass(frozen=True)
class Sources:
    """What a tensor comes from directly: without a call in between."""

    calls: frozenset[int]
    """Calls, by their place in the order of calls."""
    parameters: frozenset[str]
    """Parameters that enter outside of any call."""
    stops: frozenset[int]
    """Tensors that the search was told not to look behind."""


class Flow:
    """The dataflow of one traced forward.

    Args:
        calls: In the order in which they ran; the last stands for the model's output.
        made: The call that made each tensor that carries no gradient and comes from a layer, by id.
        parameters: Names of the parameters, by the id of what stood for them in the trace.
    """

    def __init__(
        self, calls: Sequence[Call], made: Mapping[int, int], parameters: Mapping[int, str]
    ) -> None:
        self.calls = calls
        self._made = made
        self._parameter_names = parameters
        self._begins = [call.begin for call in calls]
        self._reached = self._behind_output()
        self._sources = {
            (index, path): self.trace_back(tensor)
            for index, call in enumerate(calls)
            for path, tensor in call.leaves
        }

    def sources(self, call: int, path: Path) -> Sources:
        """Return what a tensor that a call was given comes from."""
        return self._sources[call, path]

    def direct_uses(self) -> dict[str, list[int]]:
        """Return for each parameter the calls whose arguments it enters outside of any call."""
        uses: dict[str, list[int]] = {}
        for (index, _), sources in self._sources.items():
            for name in sources.parameters:
                uses.setdefault(name, []).append(index)
        return uses

    def reaches_output(self, tensor: torch.Tensor) -> bool:
        """Return whether the model's output depends on a tensor."""
        return tensor.requires_grad and autograd_edge(tensor)[0] in self._reached

    def trace_back(
        self, tensor: torch.Tensor, stops: Mapping[Edge | int, int] | None = None
    ) -> Sources:
        """Follow a tensor back to what it comes from.

        Args:
            tensor: A tensor of the trace.
            stops: Numbers of tensors not to look behind, by autograd edge, or by id for those
                that carry no gradient.
        """
        stops = stops or {}
        calls: set[int] = set()
        names: set[str] = set()
        met: set[int] = set()
        if not tensor.requires_grad:
            if id(tensor) in stops:
                met.add(stops[id(tensor)])
            elif id(tensor) in self._made:
                calls.add(self._made[id(tensor)])
            return Sources(frozenset(calls), frozenset(), frozenset(met))
        stack = [autograd_edge(tensor)]
        seen = set(stack)
        while stack:
            node, index = stack.pop()
            if (node, index) in stops:
                met.add(stops[node, index])
                continue
            parameter = getattr(node, "variable", None)
            if parameter is not None:
                names |= (
                    {self._parameter_names[id(parameter)]}
                    if id(parameter) in self._parameter_names
                    else set()
                )
                continue
            call = self._call_of(node)
            if call is not None:
                calls.add(call)
                continue
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            stack += [edge for edge in edges if edge not in seen]
            seen.update(edges)
        return Sources(frozenset(calls), frozenset(names), frozenset(met))

    def _call_of(self, node: Any) -> int | None:
        """Return the call in which a node of the graph was made."""
        number = sequence_number(node)
        index = bisect.bisect_right(self._begins, number) - 1
        # Of calls that began at the same number only the last can have made a node.
        return index if index >= 0 and number < self.calls[index].end else None

    def _behind_output(self) -> set[Any]:
        stack = [autograd_edge(t)[0] for _, t in self.calls[-1].leaves if t.requires_grad]
        seen = set(stack)
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    stack.append(node)
        return seen


def leaves_of(arguments: Mapping[str | int, Any]) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors among a call's arguments, each with its path."""
    return [
        (((name, None), *path), tensor)
        for name, value in arguments.items()
        for path, tensor in _walk(value)
    ]


def _walk(value: Any) -> list[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [((), value)]
    steps: list[tuple[Step, Any]] = []
    if isinstance(value, Mapping):
        steps = [((key, None), each) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        steps = [((index, len(value)), each) for index, each in enumerate(value)]
    return [((step, *path), tensor) for step, each in steps for path, tensor in _walk(each)]
