"""Which layers of a vision-language model take more of its images than the embeddings hold."""

import inspect
from dataclasses import replace

from torch import nn

from pp_split_hf.trace import ForwardTrace


def layers_that_take_images(model: nn.Module, layers: str) -> int:
    """Return how many layers, from the first on, are given features of a vision tower.

    Beside the hidden states, that is: DeepStack adds some behind each of the first layers. A traced
    forward of text alone does not show it.
    """
    decoder = model.get_submodule(layers.rpartition(".")[0])
    if not any("deepstack" in name for name in inspect.signature(decoder.forward).parameters):
        return 0
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    indexes = getattr(vision, "deepstack_visual_indexes", None)
    # Where the config does not tell, no layer is safe.
    return len(model.get_submodule(layers)) if indexes is None else len(indexes)  # type: ignore[arg-type]


def keep_first_layers_together(trace: ForwardTrace, count: int) -> ForwardTrace:
    """Forbid to cut before any of the first layers: what they take is made on the first stage.

    It has a row per placeholder token, so that no fixed shape could cross a boundary.
    """
    problem = (
        f"layers 0 to {count - 1} take features of the vision tower beside the hidden states, and "
        "only the first stage has the tower"
    )
    crossings = tuple(
        replace(crossing, problem=crossing.problem or problem) if i < count else crossing
        for i, crossing in enumerate(trace.crossings)
    )
    return replace(trace, crossings=crossings)
