"""What a model costs, counted from its shapes alone."""

import logging
from dataclasses import replace

import torch
from torch import nn

from pp_autopipeline.checks import warn_once
from pp_autopipeline.counting import CountedPart, count_parts
from pp_autopipeline.parts import recomputes
from pp_autopipeline.workload import Workload
from pp_schedule import Costs, LayerCosts
from pp_split_hf import ModelLayout, find_layout

logger = logging.getLogger(__name__)


def estimate_costs(
    model: nn.Module,
    *,
    seq_len: int,
    microbatch_size: int = 1,
    layout: ModelLayout | None = None,
    dtype: torch.dtype | None = None,
    optimizer_bytes_per_parameter: float | None = None,
) -> Costs:
    """Return what a model costs for one microbatch: work in FLOPs, and bytes.

    The model's own forward runs on fake tensors, and behind each layer its backward: nothing is
    computed or allocated, and a model on the meta device does.

    Work is what `torch.utils.flop_counter` counts: products of matrices, convolutions, attention.
    Attention is over the whole sequence: half of it where the kernel is told that it is causal, all
    of it where a mask says what is not seen (sliding windows), since that is computed and thrown
    away. Of a mixture of experts those that tokens are sent to count. Frozen parameters have no
    weight half. Layers with gradient checkpointing run again in their backward. The loss is the
    cross entropy of every token, in float32. Rows hold one text each, without padding, and no
    images.

    Activations are what autograd saves and a layer's input, and behind the last layer the logits.
    Masks and tables, which every stage makes anew, count once, on the first. Kernels are those of
    the CPU: where it has none for an attention, its scores count too, which a GPU may not keep.

    Args:
        model: A Hugging Face model, on any device; it is not changed.
        seq_len: Tokens per row.
        microbatch_size: Rows.
        layout: Of the model, if known already.
        dtype: The dtype that floating point parameters will have; None keeps the model's.
        optimizer_bytes_per_parameter: Optimizer's state per trained parameter; None means two
            numbers in the parameter's dtype, as AdamW has. AdamW in float32 with a float32 copy of
            the weight has 12.

    Returns:
        The costs; `in_seconds` turns FLOPs into seconds. Parameters count with gradient and
        optimizer's state, a tied one on either stage; the boundary is the widest.

    Raises:
        ValueError: Naming everything that is wrong; if the model has no decoder layers, or layers
            of which values decide how much they do.
        RuntimeError: If the forward cannot run on fake tensors.
    """
    layout = layout or find_layout(model, dtype)
    work = Workload(model, layout, seq_len, microbatch_size, dtype, optimizer_bytes_per_parameter)
    parts = count_parts(model, layout, microbatch_size, seq_len, dtype)
    uncountable = next((i for i, part in enumerate(parts) if part.depends_on_values), None)
    if uncountable is not None:
        names = ("the code before the layers", *layout.layer_fqns, "the code behind the layers")
        raise ValueError(
            f"cannot count the work of {type(model).__name__} from its shapes: in "
            f"{names[uncountable]} values decide how much is computed, as in a loop over experts. "
            "Measure it: measure_costs(model, device=...)"
        )
    warn_of_encoders(model, layout)
    return work.costs([part_costs(model, layout, i, part) for i, part in enumerate(parts)])


def part_costs(model: nn.Module, layout: ModelLayout, index: int, part: CountedPart) -> LayerCosts:
    """Return what was counted of a part, 0 being what comes before the layers."""
    costs = LayerCosts(
        part.forward, part.backward_input, part.backward_weight, part.activation_bytes
    )
    if 0 < index <= layout.num_layers and recomputes(model, layout, index - 1):
        # The gradient of the input is the first that needs the forward again.
        again = part.backward_input + part.forward
        costs = replace(costs, backward_input=again, activation_bytes=part.input_bytes)
    return costs


def warn_of_encoders(model: nn.Module, layout: ModelLayout) -> None:
    """Warn that images count nothing."""
    if layout.multimodal_encoders:
        warn_once(
            logger,
            f"the costs of {type(model).__name__} are those of text: "
            f"{', '.join(layout.multimodal_encoders)} on the first stage count no work; add theirs "
            "with dataclasses.replace(costs, first=...)",
        )
