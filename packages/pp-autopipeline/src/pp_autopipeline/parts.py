"""The parts of a model that a split weighs: what comes before the layers, each layer, the rest."""

from torch import nn

from pp_split_hf import ModelLayout


def owned_parameters(model: nn.Module, layout: ModelLayout) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each part: the first stage's own, each layer's, the last stage's.

    What runs between two layers belongs to the earlier one, as on a stage. A part has a parameter
    once, under the first name by which the model lists it; a tied one is in every part that has it.
    """
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(layout.num_layers + 2)]
    owners = dict.fromkeys(layout.first_stage, 0)
    owners |= {fqn: 1 + i for i, fqn in enumerate(layout.layer_fqns)}
    owners |= {fqn: 1 + layer for fqn, layer in layout.between}
    owners |= dict.fromkeys(layout.last_stage, len(parts) - 1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        steps = name.split(".")
        fqns = (".".join(steps[:depth]) for depth in range(len(steps), 0, -1))
        owner = next((owners[fqn] for fqn in fqns if fqn in owners), None)
        if owner is not None:
            parts[owner][names[id(parameter)]] = parameter
    return parts


def learned_positions(model: nn.Module, layout: ModelLayout) -> int | None:
    """Return the longest sequence that a model takes, if it learns a vector per position."""
    config = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    positions: int | None = getattr(config, "max_position_embeddings", None)
    modules = dict(model.named_modules())
    tables = [m for fqn in layout.embeddings if isinstance(m := modules.get(fqn), nn.Embedding)]
    learned = positions is not None and any(
        # OPT and its like keep two rows more than there are positions.
        table.num_embeddings in (positions, positions + 2)
        for table in tables[1:]
    )
    return positions if learned else None


def recomputes(model: nn.Module, layout: ModelLayout, index: int) -> bool:
    """Return whether a layer keeps but its input and runs again in the backward."""
    layer = model.get_submodule(f"{layout.layers}.{index}")
    decoder = model.get_submodule(layout.layers.rpartition(".")[0])
    flag = getattr(layer, "gradient_checkpointing", None)
    return bool(getattr(decoder, "gradient_checkpointing", False) if flag is None else flag)
