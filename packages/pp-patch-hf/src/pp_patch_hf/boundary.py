"""Where hidden states enter and leave a stage in the middle of an architecture's own forward.

A boundary lies at what enters a layer. The sending stage runs its forward up to the stand-in of
the first layer that it does not own and keeps what was about to enter; the receiving stage runs
the same forward, and when it reaches its first own layer, what was received takes the place of
whatever was about to enter. Code between two layers so runs once, on the sending stage. Behind
the last layer there is no next one: there the boundary lies at what leaves it.
"""

from typing import Any

import torch
from torch import nn

from pp_split_hf import StagePart


class Boundary:
    """The hidden states on their way into and out of one stage's running forward."""

    def __init__(self, part: StagePart) -> None:
        self.stage_index = part.stage_index
        self.hidden_keyword = part.layout.trace.hidden_keyword
        self.running = False
        self._incoming: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None

    def start(self, incoming: torch.Tensor | None) -> None:
        """Begin a forward; `incoming` is what was received, None on the first stage."""
        self.running = True
        self._incoming = incoming
        self._outgoing = None

    def finish(self) -> torch.Tensor | None:
        """End the forward and return what is to be sent."""
        outgoing = self._outgoing
        self.running = False
        self._incoming = self._outgoing = None
        return outgoing

    def receive(self) -> torch.Tensor:
        """Return what takes the place of the hidden states at hand."""
        if not self.running or self._incoming is None:
            raise RuntimeError(
                f"stage {self.stage_index} reached its first layer outside of its own forward: it "
                "is wrapped in activation checkpointing from the inside. Wrap the layers first "
                "and call patch_hf_model_for_pp afterwards"
            )
        return self._incoming

    def keep(self, hidden: torch.Tensor) -> None:
        """Keep the hidden states that are to be sent."""
        # A forward that is run again for its activations has been sent already.
        if self.running:
            self._outgoing = hidden


class Gate:
    """Mixed into the class of one module of a stage: the boundary lies at its call.

    The call itself is taken over, not `forward` and not a hook: activation checkpointing runs
    those again in the backward, when the boundary already belongs to another microbatch.
    """

    _pp_boundary: Boundary
    _pp_roles: frozenset[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the boundary before or after it."""
        boundary, roles = self._pp_boundary, self._pp_roles
        keyword = boundary.hidden_keyword
        if "receive before" in roles:
            if args:
                args = (boundary.receive(), *args[1:])
            else:
                kwargs = {**kwargs, str(keyword): boundary.receive()}
        if "send before" in roles:
            boundary.keep(args[0] if args else kwargs[str(keyword)])
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if "receive after" in roles:
            received = boundary.receive()
            several = isinstance(output, tuple | list)
            output = type(output)([received, *output[1:]]) if several else received
        if "send after" in roles:
            boundary.keep(output[0] if isinstance(output, tuple | list) else output)
        return output


def place_gates(layers: nn.ModuleList, part: StagePart, boundary: Boundary) -> list[nn.Module]:
    """Put the boundary of a stage at its layers; return the modules that `remove_gate` undoes."""
    roles: dict[int, set[str]] = {}
    num_layers = len(layers)
    if not part.is_first:
        at_end = part.first_layer == num_layers
        index, role = (
            (num_layers - 1, "receive after") if at_end else (part.first_layer, "receive before")
        )
        roles.setdefault(index, set()).add(role)
    if not part.is_last:
        at_end = part.end_layer == num_layers
        index, role = (num_layers - 1, "send after") if at_end else (part.end_layer, "send before")
        roles.setdefault(index, set()).add(role)
    for index, names in roles.items():
        _add_gate(layers[index], boundary, frozenset(names))
    return [layers[index] for index in roles]


def _add_gate(module: nn.Module, boundary: Boundary, roles: frozenset[str]) -> None:
    cls = type(module)
    # As FSDP2 does: a class of its own for this one object keeps isinstance and FQNs as they are.
    module.__class__ = type(cls.__name__, (Gate, cls), {"_pp_ungated": cls})
    object.__setattr__(module, "_pp_boundary", boundary)
    object.__setattr__(module, "_pp_roles", roles)


def remove_gate(module: nn.Module) -> None:
    """Undo a gate.

    Raises:
        RuntimeError: If the module's class was changed again since.
    """
    ungated = vars(type(module)).get("_pp_ungated")
    if ungated is None:
        raise RuntimeError(
            f"{type(module).__name__} was wrapped after it was patched for the pipeline (by "
            "fully_shard, for instance), so the patch cannot be taken off it"
        )
    module.__class__ = ungated
    object.__delattr__(module, "_pp_boundary")
    object.__delattr__(module, "_pp_roles")
