"""Under which names a model's tensors are stored, and which of them are converted together."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from pp_split_hf.layout import ModelLayout
from pp_split_hf.transformers_private import stored_form
from pp_split_hf.weight_map import same_tensors

Units = list[tuple[str, ...]]
"""Names of the model's tensors, those that are converted together in one tuple."""


def kept_names(skeleton: nn.Module) -> list[str]:
    """Return the names in a model's state dict that are stored: of a tied weight only one.

    It is the one that `from_pretrained` looks for first, as the architecture declares it. Of a tie
    made by hand, which `from_pretrained` does not know of, all names are stored.
    """
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or {})
    ignored = set(getattr(skeleton, "_keys_to_ignore_on_save", None) or ())
    names = [
        name
        for group in same_tensors(skeleton)
        for name in [each for each in group if each not in tied] or group[:1]
    ]
    return [name for name in names if name not in ignored]


def stored_units(
    skeleton: nn.Module, layout: ModelLayout, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[tuple[str, ...], dict[str, torch.Tensor]]]:
    """Divide tensors into units that can be converted one after the other.

    A unit is a decoder layer, and one is everything else; all is one unit if an architecture
    converts tensors of several layers together.

    Args:
        skeleton: The whole model.
        layout: Of the model.
        tensors: On the meta device, of the dtypes that are stored.

    Returns:
        The names of each unit and what it is stored as, on the meta device.
    """
    prefixes = [f"{fqn}." for fqn in layout.layer_fqns]
    by_layer: dict[str, list[str]] = {}
    for name in tensors:
        layer = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        by_layer.setdefault(layer, []).append(name)
    units = [
        (tuple(names), stored_form(skeleton, {name: tensors[name] for name in names}))
        for names in by_layer.values()
    ]
    together = stored_form(skeleton, dict(tensors))
    if shapes(form for _, form in units) != shapes([together]):
        return [(tuple(tensors), together)]
    return units


def shapes(forms: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name."""
    return {name: tuple(tensor.shape) for form in forms for name, tensor in form.items()}
