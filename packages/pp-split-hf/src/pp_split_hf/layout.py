"""Where the parts of a Hugging Face model are, found by its structure and one traced forward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pp_split_hf.crossing import Slot
from pp_split_hf.image_layers import keep_first_layers_together, layers_that_take_images
from pp_split_hf.router import RouterLoss, find_router_loss
from pp_split_hf.trace import ForwardTrace, trace_forward


@dataclass(frozen=True)
class ModelLayout:
    """The modules of a decoder model by the role they play for a pipeline, as FQNs."""

    layers: str
    """The container of the decoder layers, such as `model.layers` or `transformer.h`."""
    num_layers: int
    """How many layers it has."""
    embeddings: tuple[str, ...]
    """Modules, and parameters of the decoder itself, that are used before the layers: the first
    stage's."""
    multimodal_encoders: tuple[str, ...]
    """Modules that text alone does not reach, such as vision towers: the first stage's."""
    norms: tuple[str, ...]
    """Modules and parameters that are used after the layers inside the decoder: the last stage's."""
    heads: tuple[str, ...]
    """Modules with parameters that run after the decoder: the last stage's."""
    shared: tuple[str, ...]
    """Modules without parameters, such as rotary tables and dropouts: kept on every stage."""
    between: tuple[tuple[str, int], ...]
    """Modules with parameters that run between layers, and the layer whose stage has them."""
    unplaceable: tuple[tuple[str, str], ...]
    """FQN and reason of everything that belongs to no one stage."""
    trace: ForwardTrace
    """The forward that told."""
    router: RouterLoss | None = None
    """The auxiliary loss of its routers, if its config asks for one; then its sums are the last
    slot of every crossing."""

    @property
    def layer_fqns(self) -> tuple[str, ...]:
        """The layers, in order."""
        return tuple(f"{self.layers}.{i}" for i in range(self.num_layers))

    @property
    def first_stage(self) -> tuple[str, ...]:
        """What only the first stage can have."""
        return (*self.embeddings, *self.multimodal_encoders)

    @property
    def last_stage(self) -> tuple[str, ...]:
        """What only the last stage can have."""
        return (*self.norms, *self.heads)


def find_layout(model: nn.Module, dtype: torch.dtype | None = None) -> ModelLayout:
    """Return the layout of a Hugging Face model with a list of decoder layers.

    No list of model names is used. The layers are the module list whose length the config tells;
    everything beside it on the way from the model's root is sorted by when it runs in one forward
    on fake tensors. The model may be on any device, meta included; it is not changed, and nothing
    is computed.

    Args:
        model: A Hugging Face model.
        dtype: The dtype that its parameters will be cast to; None means the one they have.

    Raises:
        ValueError: If the model has no list of decoder layers; the message tells what lists there
            are.
        RuntimeError: If its forward cannot be traced.
    """
    candidates = _layer_lists(model)
    for layers in candidates:
        num_layers = len(model.get_submodule(layers))  # type: ignore[arg-type]
        units = list(_units(model, layers))
        layer_fqns = [f"{layers}.{i}" for i in range(num_layers)]
        try:
            trace = trace_forward(model, layer_fqns, units, dtype)
        except RuntimeError as error:
            if num_layers == _lists_and_count(model)[1]:
                raise
            raise ValueError(f"{_no_layers(model)}; taking {layers!r} for it, {error}") from error
        if not {*layer_fqns}.isdisjoint(trace.order):
            break  # a vision tower of as many layers does not run for text
    roles: dict[str, list[str]] = {
        role: [] for role in ("embeddings", "multimodal_encoders", "norms", "heads", "shared")
    }
    between, unplaceable = [], []
    for fqn in units:
        role = _role(fqn, model, layers, trace)
        if role in roles:
            roles[role].append(fqn)
        elif role == "between":
            between.append((fqn, _layer_before(fqn, layer_fqns, trace)))
        else:
            unplaceable.append((fqn, role))
    for name in _bare_parameters(model, layers):
        where = trace.bare_parameters.get(name, "before")  # one that nothing reads goes anywhere
        if where == "between":
            unplaceable.append((name, "a parameter that is used before and after a layer"))
        else:
            roles["embeddings" if where == "before" else "norms"].append(name)
    router = find_router_loss(model)
    if router is not None:
        slot = Slot(router.shape, ())
        trace = replace(
            trace, crossings=tuple(replace(c, slots=(*c.slots, slot)) for c in trace.crossings)
        )
    if roles["multimodal_encoders"]:
        trace = keep_first_layers_together(trace, layers_that_take_images(model, layers))
    return ModelLayout(
        layers,
        num_layers,
        between=tuple(between),
        unplaceable=tuple(unplaceable),
        trace=trace,
        router=router,
        **{role: tuple(fqns) for role, fqns in roles.items()},
    )


def containers_of(layers: str) -> list[str]:
    """Return the FQNs on the way from the root to the layers, the layers left out."""
    names = layers.split(".")
    return [".".join(names[:depth]) for depth in range(len(names))]


def _layer_lists(model: nn.Module) -> list[str]:
    """Return the lists that may be the decoder's layers, the most likely first."""
    lists, wanted = _lists_and_count(model)
    # Some count otherwise (two attentions to a layer): then the largest list must do, and the trace
    # shows whether it is a chain.
    fitting = [fqn for fqn, module in lists.items() if len(module) == wanted] or (
        list(lists) if wanted is not None else []
    )
    if not fitting:
        raise ValueError(_no_layers(model))
    sizes = {fqn: sum(p.numel() for p in lists[fqn].parameters()) for fqn in fitting}
    return sorted(fitting, key=lambda fqn: -sizes[fqn])


def _lists_and_count(model: nn.Module) -> tuple[dict[str, nn.ModuleList], int | None]:
    lists = {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not _inside_a_list(model, fqn)
    }
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    wanted = getattr(config, "num_hidden_layers", None)
    return lists, wanted


def _no_layers(model: nn.Module) -> str:
    lists, wanted = _lists_and_count(model)
    found = ", ".join(f"{fqn} ({len(module)})" for fqn, module in lists.items()) or "none"
    return (
        f"{type(model).__name__} has no list of decoder layers: looked for an nn.ModuleList with "
        f"config.num_hidden_layers={wanted} entries, found {found}"
    )


def _inside_a_list(model: nn.Module, fqn: str) -> bool:
    return any(
        isinstance(model.get_submodule(parent), nn.ModuleList) for parent in containers_of(fqn)
    )


def _units(model: nn.Module, layers: str) -> Iterator[str]:
    """Yield the FQNs of all modules beside the way from the root to the layers."""
    path = [*containers_of(layers), layers]
    for container in path[:-1]:
        for name, _ in model.get_submodule(container).named_children():
            fqn = f"{container}.{name}" if container else name
            if fqn not in path:
                yield from _called(model, fqn)


def _called(model: nn.Module, fqn: str) -> Iterator[str]:
    """Yield a module, or, of a list or dict of modules, which is never called itself, its items."""
    module = model.get_submodule(fqn)
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for name, _ in module.named_children():
            yield from _called(model, f"{fqn}.{name}")
    else:
        yield fqn


def _bare_parameters(model: nn.Module, layers: str) -> Iterator[str]:
    """Yield the parameters that the decoder or a module around it holds itself."""
    for container in [*containers_of(layers), layers]:
        for name, _ in model.get_submodule(container).named_parameters(recurse=False):
            yield f"{container}.{name}" if container else name


def _container(fqn: str, layers: str) -> str:
    """Return the module on the way to the layers that has a module beside that way."""
    return max((c for c in containers_of(layers) if not c or fqn.startswith(f"{c}.")), key=len)


def _role(fqn: str, model: nn.Module, layers: str, trace: ForwardTrace) -> str:
    """Return the role of a module, "between", or a sentence that says why it has none."""
    module = model.get_submodule(fqn)
    if next(module.parameters(), None) is None:
        return "shared"
    container = _container(fqn, layers)
    at_layers = [i for i, name in enumerate(trace.order) if name.startswith(f"{layers}.")]
    calls = [i for i, name in enumerate(trace.order) if name == fqn]
    if not calls:
        if any(name.startswith(f"{fqn}.") for name in trace.bare_parameters):
            return "its weights are used without it being called"
        path = [*containers_of(layers), layers]
        siblings = [
            f"{container}.{name}" if container else name
            for name, _ in model.get_submodule(container).named_children()
        ]
        on_path = next(sibling for sibling in siblings if sibling in path)
        mine = next(
            sibling for sibling in siblings if fqn == sibling or fqn.startswith(f"{sibling}.")
        )
        precedes = siblings.index(mine) < siblings.index(on_path)
        return "multimodal_encoders" if precedes else ("norms" if container else "heads")
    if not at_layers or calls[-1] < at_layers[0]:
        return "embeddings"
    if calls[0] > at_layers[-1]:
        return "heads" if container == "" and layers.count(".") > 0 else "norms"
    return "between"


def _layer_before(fqn: str, layers: Sequence[str], trace: ForwardTrace) -> int:
    """Return the furthest layer that has run when a module between layers first runs."""
    first = trace.order.index(fqn)
    return max((i for i, layer in enumerate(layers) if layer in trace.order[:first]), default=0)
