"""Where hidden states enter and leave a stage in the middle of an architecture's own forward.

A boundary lies at what enters a layer. The sending stage runs its forward up to the stand-in of
the first layer that it does not own and keeps what was about to enter; the receiving stage runs
the same forward, and when it reaches its first own layer, what was received takes the place of
whatever was about to enter. Code between two layers so runs once, on the sending stage. Behind
the last layer there is no next one: there the boundary lies at what leaves it.

Some architectures give a layer more than the hidden states: embeddings, keys and values of an
earlier layer, a router's state. What of that must cross was found when the model was laid out
(`pp_split_hf.Crossing`); it is taken and put in at the calls that read it, in the same way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pp_patch_hf.torch_private import is_view
from pp_split_hf import Crossing, Place, Slot, StagePart

Where = tuple[int, tuple[Any, ...], bool]
"""Number of a slot, path to it from the arguments, and whether it is put in place."""


class Boundary:
    """What is on its way into and out of one stage's running forward."""

    def __init__(self, part: StagePart) -> None:
        crossings = part.layout.trace.crossings
        self.stage_index = part.stage_index
        self.received = None if part.is_first else crossings[part.first_layer]
        self.sent = None if part.is_last else crossings[part.end_layer]
        self.end_layer = part.end_layer
        self.running = False
        self.incoming: tuple[torch.Tensor, ...] = ()
        self.outgoing: dict[int, torch.Tensor] = {}
        self.num_calls: dict[str, int] = {}

    def start(self, incoming: Sequence[torch.Tensor]) -> None:
        """Begin a forward; `incoming` is what was received, empty on the first stage."""
        wanted = len(self.received.slots) if self.received else 0
        if len(incoming) != wanted:
            raise TypeError(
                f"stage {self.stage_index} takes {wanted} tensors from the stage before and was "
                f"given {len(incoming)}"
            )
        self.running = True
        self.incoming = tuple(map(_with_contiguous_gradient, incoming))
        self.outgoing = {}
        self.num_calls = {}

    def finish(self) -> dict[int, torch.Tensor]:
        """End the forward and return what was kept, by number of the slot."""
        outgoing = self.outgoing
        self.running = False
        self.incoming, self.outgoing = (), {}
        return outgoing

    def output(self, outgoing: dict[int, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return what is sent: the hidden states, or a tuple that begins with them.

        Raises:
            RuntimeError: If the forward never came to where something is taken.
        """
        assert self.sent is not None
        slots = self.sent.slots
        for number, slot in enumerate(slots):
            if number not in outgoing:
                where = slot.places[0].fqn if slot.places else f"layer {self.end_layer}"
                raise RuntimeError(
                    f"stage {self.stage_index} never reached {where}, where what it sends is "
                    "taken: the architecture left its layers out"
                )
        hidden = outgoing[0].contiguous()
        # torch's stages detach in place what they have sent; compiled code may make any output a
        # view, and cannot ask.
        if torch.compiler.is_compiling() or is_view(hidden):
            hidden = hidden.clone()
        if len(slots) == 1:
            return hidden
        return hidden, *(
            _sendable(outgoing[number], slots[number]) for number in range(1, len(slots))
        )

    def receive(self, number: int) -> torch.Tensor:
        """Return a tensor that was received."""
        if not self.running:
            raise RuntimeError(
                f"stage {self.stage_index} reached its first layer outside of its own forward: it "
                "is wrapped in activation checkpointing from the inside. Wrap the layers first "
                "and call patch_hf_model_for_pp afterwards"
            )
        return self.incoming[number]

    def keep(self, number: int, tensor: torch.Tensor) -> None:
        """Keep a tensor that is to be sent."""
        # A forward that is run again for its activations has been sent already.
        if self.running:
            self.outgoing[number] = tensor


class Gate:
    """Mixed into the class of one module of a stage: a boundary lies at its call.

    The call itself is taken over, not `forward` and not a hook: activation checkpointing runs
    those again in the backward, when the boundary already belongs to another microbatch.
    """

    _pp_boundary: Boundary
    _pp_fqn: str
    _pp_put: dict[int, tuple[Where, ...]]
    _pp_take: dict[int, tuple[Where, ...]]
    _pp_after: tuple[bool, bool, int]
    _pp_counts: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the boundary before or after it."""
        boundary = self._pp_boundary
        call = 0
        if self._pp_counts:
            call = boundary.num_calls.get(self._pp_fqn, 0)
            boundary.num_calls[self._pp_fqn] = call + 1
        # 1. What was received takes the place of what was about to enter.
        for number, path, in_place in self._pp_put.get(call, ()):
            args, kwargs = _put(args, kwargs, path, boundary.receive(number), in_place)
        # 2. What is sent is kept.
        for number, path, _ in self._pp_take.get(call, ()):
            boundary.keep(number, _take(args, kwargs, path))
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        # 3. The same for what leaves the last layer.
        receives_after, sends_after, last_call = self._pp_after
        several = isinstance(output, tuple | list)
        if receives_after and call == last_call:
            received = boundary.receive(0)
            output = type(output)([received, *output[1:]]) if several else received
        if sends_after and call == last_call:
            boundary.keep(0, output[0] if several else output)
        return output


def place_gates(model: nn.Module, part: StagePart, boundary: Boundary) -> list[nn.Module]:
    """Put the boundaries of a stage at their modules; return those, for `remove_gate`."""
    puts: dict[str, dict[int, list[Where]]] = {}
    takes: dict[str, dict[int, list[Where]]] = {}
    for number, slot in enumerate(_slots(boundary.received)):
        for place in slot.places:
            _note(puts, place, number, slot.in_place)
    for number, slot in enumerate(_slots(boundary.sent)):
        if slot.places:
            _note(takes, slot.places[0], number, False)
    num_layers = part.layout.num_layers
    order = part.layout.trace.order
    ran = [fqn for fqn in order if fqn in part.layout.layer_fqns]
    receives_after = not part.is_first and part.first_layer == num_layers
    sends_after = not part.is_last and part.end_layer == num_layers
    after = {ran[-1]} if receives_after or sends_after else set()
    fqns = [fqn for fqn in dict.fromkeys(order) if fqn in {*puts, *takes, *after}]
    for fqn in fqns:
        at_end = fqn in after
        _add_gate(
            model.get_submodule(fqn),
            {
                "_pp_boundary": boundary,
                "_pp_fqn": fqn,
                "_pp_put": {call: tuple(each) for call, each in puts.get(fqn, {}).items()},
                "_pp_take": {call: tuple(each) for call, each in takes.get(fqn, {}).items()},
                "_pp_after": (
                    at_end and receives_after,
                    at_end and sends_after,
                    ran.count(fqn) - 1,
                ),
                "_pp_counts": order.count(fqn) > 1,
            },
        )
    return [model.get_submodule(fqn) for fqn in fqns]


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
    for name in Gate.__annotations__:
        object.__delattr__(module, name)


def _add_gate(module: nn.Module, attributes: dict[str, Any]) -> None:
    cls = type(module)
    # As FSDP2 does: a class of its own for this one object keeps isinstance and FQNs as they are.
    module.__class__ = type(cls.__name__, (Gate, cls), {"_pp_ungated": cls})
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def _slots(crossing: Crossing | None) -> tuple[Slot, ...]:
    return crossing.slots if crossing is not None else ()


def _note(
    notes: dict[str, dict[int, list[Where]]], place: Place, number: int, in_place: bool
) -> None:
    notes.setdefault(place.fqn, {}).setdefault(place.call, []).append(
        (number, place.path, in_place)
    )


def _put(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: Any, tensor: torch.Tensor, in_place: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with a tensor put in at a path."""
    (name, _), *inside = path
    if isinstance(name, int):
        new = _put_inside(args[name], inside, tensor, in_place)
        return (*args[:name], new, *args[name + 1 :]), kwargs
    return args, {**kwargs, name: _put_inside(kwargs.get(name), inside, tensor, in_place)}


def _put_inside(value: Any, path: Any, tensor: torch.Tensor, in_place: bool) -> Any:
    if not path:
        return value.copy_(tensor) if in_place else tensor
    (key, length), *inside = path
    if length is None:
        # In the very container: layers of one forward share it.
        value = {} if value is None else value
        value[key] = _put_inside(value.get(key), inside, tensor, in_place)
        return value
    items = list(value) if value is not None else [None] * length
    items[key] = _put_inside(items[key], inside, tensor, in_place)
    return items if isinstance(value, list) else tuple(items)


def _take(args: tuple[Any, ...], kwargs: dict[str, Any], path: Any) -> Any:
    (name, _), *inside = path
    value = args[name] if isinstance(name, int) else kwargs[name]
    for key, _ in inside:
        value = value[key]
    return value


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient can be sent: torch's stages send it as it comes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _with_contiguous_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    received: torch.Tensor = _ContiguousGradient.apply(tensor)
    return received


def _sendable(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return a tensor of its own: it may be a slice, or what was received itself."""
    if not slot.shape.requires_grad:
        tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format)
