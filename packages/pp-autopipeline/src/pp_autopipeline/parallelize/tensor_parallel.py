"""Tensor, sequence and expert parallelism of a stage by the plans that Transformers has for it."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from pp_autopipeline import transformers_private
from pp_autopipeline.checks import refuse
from pp_autopipeline.parallelize.shared_gradients import sum_gradients
from pp_split_hf import stage_part

_PARTIAL = "replicated_with_grad_allreduce"


def apply_tp(
    part: nn.Module, mesh: DeviceMesh, rules: Mapping[str, Any] | None, without_experts: bool
) -> list[str]:
    """Share a stage's matrices over the ranks of a tensor-parallel axis.

    Nothing is sent: each rank keeps its share of the weights it has. Weights of which every rank
    computes the gradient of its own heads alone, such as per-head norms, have their gradients
    summed in each backward; Transformers (5.24) sums what has accumulated so far, which is wrong
    from the second microbatch on.

    Args:
        part: The stage's module.
        mesh: The axis.
        rules: Rules that come before the model's own plan, by module name with `*` for layer
            numbers: names of Transformers' styles, or torch's `ParallelStyle` objects.
        without_experts: Leave experts out, which expert parallelism shares.

    Returns:
        Names of the decoder layers' children other than norms.

    Raises:
        ValueError: Naming everything that does not fit: no plan, unknown styles or modules, heads
            that the axis does not divide.
    """
    plan = {**transformers_private.plan_of(part, "tp_plan"), **(rules or {})}
    if getattr(_config_of(part), "tie_word_embeddings", False):
        # One weight cannot be cut in the two ways that an embedding and a head are: it stays whole.
        tied = _embedding_names(part)
        plan = {name: style for name, style in plan.items() if name not in tied}
    if without_experts:
        experts = tuple(transformers_private.plan_of(part, "ep_plan"))
        plan = {k: v for k, v in plan.items() if not _is_inside(k, experts)}
    refuse(
        f"tensor parallelism over {mesh.size()} ranks is impossible",
        _problems(part, mesh.size(), plan, rules or {}),
    )
    torch_styles = {k: v for k, v in plan.items() if isinstance(v, ParallelStyle)}
    named = {k: v for k, v in plan.items() if not isinstance(v, ParallelStyle)}
    present = _present(part, transformers_private.expand_plan(part, named))
    partial = [name for name, style in present.items() if style == _PARTIAL]
    shared = {name: style for name, style in present.items() if style != _PARTIAL}
    apply_tensor_parallelism(part, mesh, shared)
    if torch_styles:
        parallelize_module(part, mesh, torch_styles)
    for name in partial:
        if name in dict(part.named_modules()):
            sum_gradients(part.get_submodule(name), mesh)
    return _regions(part)


def apply_ep(part: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> list[nn.Module]:
    """Spread a stage's experts over the ranks of an expert-parallel axis.

    Args:
        part: The stage's module.
        ep_mesh: The axis.
        tp_mesh: Ranks of the axis that have the same tokens; of size 1 if none have.

    Returns:
        The modules that hold experts.

    Raises:
        ValueError: If the model has no such plan, or the axis does not divide its experts.
    """
    plan = transformers_private.plan_of(part, "ep_plan")
    problems = []
    if not plan:
        problems.append(
            f"{type(part).__name__} has no expert-parallel plan (base_model_ep_plan): set ep_size=1"
        )
    experts = getattr(_config_of(part), "num_experts", None)
    if isinstance(experts, int) and experts % ep_mesh.size():
        problems.append(
            f"it has {experts} experts, which ep_size={ep_mesh.size()} does not divide: choose a "
            f"divisor of {experts}"
        )
    refuse(f"expert parallelism over {ep_mesh.size()} ranks is impossible", problems)
    present = _present(part, transformers_private.expand_plan(part, plan))
    if present:
        apply_expert_parallelism(part, ep_mesh, tp_mesh, present)
    modules = dict(part.named_modules())
    return [modules[name] for name in present if name in modules]


def _problems(
    part: nn.Module, size: int, plan: Mapping[str, Any], rules: Mapping[str, Any]
) -> list[str]:
    problems = []
    if not plan:
        problems.append(
            f"{type(part).__name__} has no tensor-parallel plan (base_model_tp_plan): give tp_plan, "
            "or set tp_size=1"
        )
    styles = transformers_private.style_names()
    for name, style in rules.items():
        if not isinstance(style, ParallelStyle) and style not in styles:
            problems.append(f"tp_plan[{name!r}]={style!r} is none of {', '.join(sorted(styles))}")
    config = _config_of(part)
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % size:
            problems.append(
                f"{attribute}={heads} is not a multiple of tp_size={size}: choose a divisor of it"
            )
    return problems


def _config_of(part: nn.Module) -> Any:
    config: Any = part.config
    return config.get_text_config()


def _embedding_names(part: nn.Module) -> set[str]:
    stage = stage_part(part)
    assert stage is not None
    return {*stage.layout.embeddings, *stage.layout.heads}


def _is_inside(name: str, owners: tuple[str, ...]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _present(part: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return what of a plan concerns parameters that this stage has."""
    modules, parameters = dict(part.named_modules()), dict(part.named_parameters())
    return {
        name: style
        for name, style in plan.items()
        if name in parameters or (name in modules and any(True for _ in modules[name].parameters()))
    }


def _regions(part: nn.Module) -> list[str]:
    """Return the layers' children in which tokens may meet or matrices are shared: all but norms."""
    stage = stage_part(part)
    assert stage is not None
    layers = [(name, part.get_submodule(name)) for name in stage.layout.layer_fqns]
    return [
        f"{layer}.{child}"
        for layer, module in layers
        if any(True for _ in module.parameters())
        for child, inner in module.named_children()
        if any(True for _ in inner.parameters()) and "norm" not in type(inner).__name__.lower()
    ]
