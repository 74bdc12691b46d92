"""Whether a model can be cut into pipeline stages, and if not, everything that is in the way."""

import transformers
from torch import nn
from transformers import PretrainedConfig

from pp_split_hf.layout import ModelLayout, find_layout


def check_pipeline_support(model: nn.Module, layout: ModelLayout | None = None) -> list[str]:
    """Return all that keeps a model from being trained in stages, each with what to do.

    Args:
        model: A Hugging Face model, on any device.
        layout: Of the model, if known already.

    Returns:
        Problems as sentences; an empty list is a pass.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and (problems := check_config_support(config)):
        return problems
    if layout is None:
        try:
            layout = find_layout(model)
        except (ValueError, RuntimeError) as error:
            return [str(error)]
    problems = [f"{fqn}: {reason}" for fqn, reason in layout.unplaceable]
    missing = [fqn for fqn in layout.layer_fqns if fqn not in layout.trace.order]
    if missing:
        problems.append(f"{name} never runs {', '.join(missing)}")
    elif not set(layout.trace.cuts) - {0, layout.num_layers}:
        problems += [
            f"{name} cannot be cut before layer {i}: {crossing.problem}"
            for i, crossing in enumerate(layout.trace.crossings)
            if 0 < i < layout.num_layers
        ]
    return problems + [
        f"{tied} and {source} are declared as one weight (config.tie_word_embeddings is True), but "
        "are two parameters on the meta device and would be trained apart: build the model under "
        "init_empty_weights(), or set config.tie_word_embeddings=False to train them apart"
        for tied, source in _lost_ties(model)
    ]


def check_config_support(config: PretrainedConfig) -> list[str]:
    """Return why no model of a config can be trained in stages, if its config alone tells.

    Encoders are known by Transformers' own mappings (5.24): those for masked language models.
    Some of them would run in stages, but are no decoders unless their config says so.
    """
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        return [
            f"{name} is of an encoder-decoder model (is_encoder_decoder is True): only decoder-only "
            "models can be cut into a chain of stages"
        ]
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and (
        getattr(config, "is_decoder", None) is False
        or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return [
            f"{name} is of an encoder-only model: only decoder-only models are trained in stages "
            "(some encoders become one with is_decoder=True in the config)"
        ]
    return []


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
