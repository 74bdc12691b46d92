"""The state of one rank's optimizers and schedulers by parameter names, whatever their groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pp_autopipeline.packing import pack

# How a step is computed and not what: the optimizer that resumes decides.
_OWN_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# What schedulers list per group; the groups have it too.
_PER_GROUP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "base_lrs": lambda group: group.get("initial_lr", group["lr"]),
    "_last_lr": lambda group: group["lr"],
}


def read_optimizers(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """Return the state of optimizers as `optimizer/NAME/state/...` and `optimizer/NAME/group`.

    The latter has the settings of the group that the parameter is in, and whatever of its state is
    no tensor.

    Args:
        optimizers: Of this rank.
        names: Parameter names by `id`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for optimizer, group, parameters in _groups(optimizers, names):
        common = {"optimizer": type(optimizer).__name__, "settings": _settings(group), "values": {}}
        packed = pack(common, f"a parameter group of {type(optimizer).__name__}")
        for name, parameter in parameters.items():
            state = optimizer.state.get(parameter, {})
            values = {key: v for key, v in state.items() if not isinstance(v, torch.Tensor)}
            tensors[f"optimizer/{name}/group"] = (
                pack({**common, "values": values}, f"the optimizer's state of {name}")
                if values
                else packed
            )
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{name}/state/{key}"] = value.detach()
    return tensors


def optimized(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Return the parameters that optimizers have, by name."""
    return {
        name: p for *_, parameters in _groups(optimizers, names) for name, p in parameters.items()
    }


def group_problems(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Mapping[str, Any]
) -> list[str]:
    """Return why optimizers cannot go on from saved groups.

    Args:
        optimizers: Of this rank.
        names: Parameter names by `id`.
        saved: The unpacked `optimizer/NAME/group` of every parameter, by its name.
    """
    problems = []
    for optimizer, _, parameters in _groups(optimizers, names):
        kind = type(optimizer).__name__
        kinds = sorted({saved[name]["optimizer"] for name in parameters} - {kind})
        problems += [f"the optimizer was {other} and is {kind}" for other in kinds]
        for name in parameters:
            first = next(iter(parameters))
            one, other = saved[first]["settings"], saved[name]["settings"]
            problems += [
                f"{first} and {name} are in one parameter group and were trained with "
                f"{key}={one.get(key)} and {key}={other.get(key)}: put them into different groups"
                for key in sorted(one.keys() | other.keys())
                if one.get(key) != other.get(key)
            ]
    return problems


def set_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Any],
    states: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Give an optimizer, which need not have stepped yet, its saved state.

    Args:
        optimizer: One of this rank's.
        names: Parameter names by `id`.
        saved: The unpacked `optimizer/NAME/group` of every parameter, by its name.
        states: The tensors of every parameter's state, by its name.
    """
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    held: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for group in optimizer.param_groups:
        first = next((names[id(p)] for p in group["params"] if id(p) in names), None)
        settings = saved[first]["settings"] if first is not None else {}
        start = sum(len(other["params"]) for other in groups)
        numbers = range(start, start + len(group["params"]))
        for number, parameter in zip(numbers, group["params"], strict=True):
            if (name := names.get(id(parameter))) is not None:
                if values := {**saved[name]["values"], **states.get(name, {})}:
                    state[number] = values
                held.append((parameter, states.get(name, {})))
        restored = {key: _like(group.get(key), value) for key, value in settings.items()}
        groups.append({**group, **restored, "params": list(numbers)})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch casts state to its parameter's dtype; float32 moments of a bfloat16 one stay as they were.
    for parameter, tensors in held:
        for key, tensor in tensors.items():
            if (now := optimizer.state[parameter][key]).dtype != tensor.dtype:
                optimizer.state[parameter][key] = tensor.to(now.device)


def read_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without what it lists per parameter group."""

    def strip(state: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in state.items() if key not in _PER_GROUP}
        if "_schedulers" in kept:
            kept["_schedulers"] = [strip(inner) for inner in kept["_schedulers"]]
        return kept

    return strip(scheduler.state_dict())


def set_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """Give a scheduler its saved state; its optimizer has its own already."""

    def fill(state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        groups = scheduler.optimizer.param_groups if now.keys() & _PER_GROUP.keys() else []
        lists = {k: [of(g) for g in groups] for k, of in _PER_GROUP.items() if k in now}
        inner = zip(state.get("_schedulers", []), now.get("_schedulers", []), strict=True)
        nested = [fill(*pair) for pair in inner]
        # Other lists per group, such as the least rates, are as this run made them.
        own = {
            key: value
            for key, value in now.items()
            if isinstance(value, list) and groups and key != "_schedulers"
            if key not in _PER_GROUP and len(value) != len(state.get(key, value))
        }
        return {**state, **lists, **own, **({"_schedulers": nested} if nested else {})}

    scheduler.load_state_dict(fill(saved, scheduler.state_dict()))


def _groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[Optimizer, dict[str, Any], dict[str, torch.Tensor]]]:
    """Yield each group with its optimizer and those of its parameters that have a name."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group, {names[id(p)]: p for p in group["params"] if id(p) in names}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in _OWN_SETTINGS
    }


def _like(now: Any, value: Any) -> Any:
    """A learning rate that is a tensor stays one."""
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value
