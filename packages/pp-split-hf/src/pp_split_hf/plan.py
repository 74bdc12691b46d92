"""Stage plans: from layers per stage to module names, and the check of any list of names."""

import difflib
import itertools
from collections.abc import Iterable, Sequence

from torch import nn

from pp_split_hf.layout import ModelLayout

MULTIMODAL_ENCODERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "image_encoder",
    "multi_modal_projector",
    "audio_tower",
)
"""Names under which models have multimodal encoders; in a plan they may name nothing."""


def spread_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage, as even as can be; the first stages take the remainder, one each."""
    least, remainder = divmod(num_layers, num_stages)
    return tuple(least + (stage < remainder) for stage in range(num_stages))


def generate_hf_model_fqn_per_model_part(
    num_stages: int,
    num_layers: int,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    include_multimodal_encoders: bool = True,
    extra_module_fqns: Iterable[str] | None = None,
    fqn_prefix: str = "model.",
    lm_head_fqn: str = "lm_head",
) -> list[list[str]]:
    """Return module names per stage for a model laid out as Llama is, by name alone.

    A stage lists, in this order: embedding, multimodal encoders, extra modules (first stage),
    layers, norm, head (last stage), rotary table (every stage). The layers are spread evenly; the
    first stages take the remainder, one each. `plan_stage_fqns` does the same for the modules that
    a model really has.

    Args:
        num_stages: Number of stages.
        num_layers: Number of decoder layers.
        include_embeddings: List `embed_tokens` on the first stage.
        include_lm_head: List the head on the last stage.
        include_rotary_emb: List `rotary_emb` on every stage.
        include_multimodal_encoders: List the usual names of vision and audio encoders on the first
            stage; names that the model lacks are no fault in a plan.
        extra_module_fqns: More FQNs for the first stage, as they are.
        fqn_prefix: What stands before the decoder's modules.
        lm_head_fqn: FQN of the head.

    Raises:
        ValueError: If `num_stages` or `num_layers` is below 1.
    """
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (("num_stages", num_stages), ("num_layers", num_layers))
        if value < 1
    ]
    if problems:
        raise ValueError("cannot make a stage plan: " + "; ".join(problems))
    stages: list[list[str]] = []
    start = 0
    for stage, count in enumerate(spread_layers(num_layers, num_stages)):
        names: list[str] = []
        if stage == 0:
            names += [f"{fqn_prefix}embed_tokens"] * include_embeddings
            if include_multimodal_encoders:
                names += [f"{fqn_prefix}{encoder}" for encoder in MULTIMODAL_ENCODERS]
            names += extra_module_fqns or ()
        names += [f"{fqn_prefix}layers.{i}" for i in range(start, start + count)]
        start += count
        if stage == num_stages - 1:
            names.append(f"{fqn_prefix}norm")
            names += [lm_head_fqn] * include_lm_head
        names += [f"{fqn_prefix}rotary_emb"] * include_rotary_emb
        stages.append(names)
    return stages


def spread_over_stages(layout: ModelLayout, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage, as even as the places allow at which the model can be cut."""
    ends: list[int] = []
    end = 0
    for count in spread_layers(layout.num_layers, num_stages)[:-1]:
        end += count
        free = [cut for cut in layout.trace.cuts if cut >= (ends[-1] if ends else 0)]
        ends.append(min(free, key=lambda cut: abs(cut - end)))
    bounds = [0, *ends, layout.num_layers]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


def plan_stage_fqns(layout: ModelLayout, layer_counts: Sequence[int]) -> list[list[str]]:
    """Return module names per stage of a model from the number of layers of each stage.

    Args:
        layout: Of the model.
        layer_counts: Layers per stage, zero allowed; their sum is the model's number of layers.

    Raises:
        ValueError: If a count is negative or the sum is wrong.
    """
    if any(count < 0 for count in layer_counts) or sum(layer_counts) != layout.num_layers:
        raise ValueError(
            f"layer_counts={tuple(layer_counts)} add up to {sum(layer_counts)}; they must be "
            f"zero or more and add up to the model's {layout.num_layers} layers"
        )
    stages: list[list[str]] = []
    start = 0
    for stage, count in enumerate(layer_counts):
        names = list(layout.first_stage) if stage == 0 else []
        names += layout.layer_fqns[start : start + count]
        names += [fqn for fqn, layer in layout.between if start <= layer < start + count]
        start += count
        if stage == len(layer_counts) - 1:
            names += layout.last_stage
        stages.append([*names, *layout.shared])
    return stages


def check_stage_fqns(
    layout: ModelLayout, stage_fqns: Sequence[Sequence[str]], model: nn.Module
) -> list[str]:
    """Return everything that is wrong with a stage plan, entry by entry; an empty list is a pass.

    Found: names of nothing (with the nearest name), of a part of a module that moves as a whole,
    doubled, missing, on the wrong stage, and layers out of order.
    """
    last = len(stage_fqns) - 1
    home: dict[str, int] = {}
    problems: list[str] = []
    between = tuple(fqn for fqn, _ in layout.between)
    placeable = (*layout.first_stage, *layout.layer_fqns, *between, *layout.last_stage)
    for stage, names in enumerate(stage_fqns):
        for name in names:
            where = f"stage {stage} lists {name!r}"
            if name in layout.shared:
                continue
            if name not in placeable:
                problem = _unknown(name, placeable + layout.shared, model)
                problems += [f"{where}, {problem}"] if problem else []
            elif name in home:
                problems.append(f"{where}, which stage {home[name]} lists already")
            elif name in layout.first_stage and stage != 0:
                problems.append(f"{where}, which runs before the layers: it belongs to stage 0")
            elif name in layout.last_stage and stage != last:
                problems.append(f"{where}, which runs after the layers: it belongs to stage {last}")
            home.setdefault(name, stage)
    problems += [f"no stage lists {name!r}" for name in placeable if name not in home]
    for fqn, layer in layout.between:
        owner = layout.layer_fqns[layer]
        if fqn in home and owner in home and home[fqn] != home[owner]:
            problems.append(
                f"stage {home[fqn]} lists {fqn!r}, which runs behind {owner!r}: it belongs to "
                f"stage {home[owner]}"
            )
    problems += _order_problems(layout, stage_fqns)
    return problems or _cut_problems(layout, stage_fqns)


def _cut_problems(layout: ModelLayout, stage_fqns: Sequence[Sequence[str]]) -> list[str]:
    """What must stay together and is on two stages."""
    problems = []
    end = 0
    for stage, names in enumerate(stage_fqns[:-1]):
        end += sum(name in layout.layer_fqns for name in names)
        problem = layout.trace.crossings[end].problem
        if problem:
            allowed = ", ".join(map(str, layout.trace.cuts))
            problems.append(
                f"stage {stage} ends before layer {end}, where the model cannot be cut: {problem}. "
                f"It can be cut before layers {allowed}"
            )
    return problems


def _order_problems(layout: ModelLayout, stage_fqns: Sequence[Sequence[str]]) -> list[str]:
    problems = []
    number = {fqn: i for i, fqn in enumerate(layout.layer_fqns)}
    expected = 0
    for stage, names in enumerate(stage_fqns):
        given = [number[name] for name in names if name in number]
        if given != sorted(given):
            problems.append(f"stage {stage} lists its layers out of order: {given}")
        if given and min(given) < expected:
            problems.append(
                f"stage {stage} lists layer {min(given)}, which must run before layer "
                f"{expected - 1} of an earlier stage"
            )
        expected = max([expected, *(i + 1 for i in given)])
    return problems


def _unknown(name: str, known: tuple[str, ...], model: nn.Module) -> str | None:
    if name.rpartition(".")[2] in MULTIMODAL_ENCODERS:
        return None
    owner = next((fqn for fqn in known if name.startswith(f"{fqn}.")), None)
    if owner is not None:
        return f"a part of {owner!r}, which moves as a whole"
    parts = [fqn for fqn in known if fqn.startswith(f"{name}.")]
    if parts:
        return f"which is more than one module: list its parts, such as {parts[0]!r}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    exists = name in dict(model.named_modules())
    return ("which no stage can take alone" if exists else "which the model does not have") + hint
