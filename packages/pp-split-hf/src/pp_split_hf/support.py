"""Whether a model can be cut into pipeline stages, and if not, everything that is in the way."""

from collections.abc import Sequence

from torch import nn

from pp_split_hf.layout import ModelLayout, find_layout


def check_pipeline_support(
    model: nn.Module,
    layout: ModelLayout | None = None,
    stage_fqns: Sequence[Sequence[str]] | None = None,
) -> list[str]:
    """Return all that keeps a model from being trained in stages, each with what to do.

    Args:
        model: A Hugging Face model, on any device.
        layout: Of the model, if known already.
        stage_fqns: The plan it is to be cut by; without one, the first and the last stage are
            taken to be two.

    Returns:
        Problems as sentences; an empty list is a pass.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return [
            f"{name} is an encoder-decoder model (config.is_encoder_decoder is True): only "
            "decoder-only models can be cut into a chain of stages"
        ]
    if layout is None:
        try:
            layout = find_layout(model)
        except (ValueError, RuntimeError) as error:
            return [str(error)]
    problems = [f"{fqn}: {reason}" for fqn, reason in layout.unplaceable]
    ran = [fqn for fqn in layout.trace.order if fqn in layout.layer_fqns]
    if ran != list(layout.layer_fqns):
        short = [fqn.removeprefix(f"{layout.layers}.") for fqn in ran]
        problems.append(
            f"the layers of {name} do not run once each and in order, but as {', '.join(short)}"
        )
    problems += [
        f"{fqn} returns no tensor, so no stand-in can take its place"
        for fqn in layout.embeddings
        if layout.trace.outputs.get(fqn, (0, None)) is None
    ]
    return problems + _tie_problems(model, layout, stage_fqns)


def validate_hf_model_for_pipeline_support(model: nn.Module) -> None:
    """Raise if a model cannot be trained in stages.

    Raises:
        ValueError: Listing all problems that `check_pipeline_support` finds.
    """
    problems = check_pipeline_support(model)
    if problems:
        raise ValueError(
            f"{type(model).__name__} cannot be trained in pipeline stages:\n  "
            + "\n  ".join(problems)
        )


def _tie_problems(
    model: nn.Module, layout: ModelLayout, stage_fqns: Sequence[Sequence[str]] | None
) -> list[str]:
    if stage_fqns is None:
        stage_fqns = [[*layout.first_stage, *layout.layer_fqns], [*layout.last_stage]]
    stage_of = {fqn: stage for stage, names in enumerate(stage_fqns) for fqn in names}
    homes: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((fqn for fqn in stage_of if name.startswith(f"{fqn}.")), None)
        if owner is not None and owner not in layout.shared:
            homes.setdefault(id(parameter), {}).setdefault(stage_of[owner], name)
    advice = (
        "a shared weight cannot be kept equal on two stages yet: load the model with "
        "config.tie_word_embeddings=False to train two separate weights, or run the model as one stage"
    )
    problems = [
        f"{' and '.join(names.values())} are one parameter on stages "
        f"{' and '.join(map(str, names))}; {advice}"
        for names in homes.values()
        if len(names) > 1
    ]
    if not problems and len(stage_fqns) > 1:
        problems += [
            f"{tied} and {source} are declared as one weight "
            f"(config.tie_word_embeddings is True) and would be trained apart; {advice}"
            for tied, source in _lost_ties(model)
        ]
    return problems


def _lost_ties(model: nn.Module) -> list[tuple[str, str]]:
    """Ties that config and class declare and that meta construction has taken apart."""
    config = getattr(model, "config", None)
    declared = getattr(model, "_tied_weights_keys", None)
    if not getattr(config, "tie_word_embeddings", False) or not isinstance(declared, dict):
        return []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        (tied, source)
        for tied, source in declared.items()
        if tied in parameters
        and source in parameters
        and parameters[tied] is not parameters[source]
        and parameters[tied].device.type == "meta"
    ]
