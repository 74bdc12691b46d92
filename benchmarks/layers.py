"""Stages of real transformer layers, and what they cost, from recorded runs."""

from functools import partial
from itertools import chain

import torch
from pipelines import Pipeline, Run
from torch import nn

from pp_schedule import Order, StageCosts, Timeline, measured_costs

LAYERS = {2: (3, 5), 4: (1, 3, 2, 2), 8: (1, 1, 2, 1, 1, 2, 1, 1)}
"""Layers of each stage, by the number of stages."""
WIDTH, ROWS, LENGTH = 256, 2, 64


def layers_pipeline(
    schedule: str | Order, num_stages: int, pp_size: int, num_microbatches: int
) -> Pipeline:
    """Return a pipeline whose stages are layers."""
    microbatch = torch.randn(ROWS, LENGTH, WIDTH)
    make_stage = partial(_make_stage, num_stages)
    return Pipeline(schedule, make_stage, num_stages, pp_size, num_microbatches, microbatch)


def measure_layers(whole: Run, halves: Run) -> StageCosts:
    """Return costs from a run with whole backwards and one with halves, on the same stages."""
    undivided, divided = (
        measured_costs(
            Timeline(tuple(chain.from_iterable(s.timeline.spans for s in found.steps)), 0.0, ())
        )
        for found in (whole, halves)
    )
    num_stages = 1 + max(span.action.stage_index for span in whole.steps[0].timeline.spans)
    both, on_input, on_weight = (
        [undivided.durations(num_stages)["B"][s] for s in range(num_stages)],
        divided.per_stage("backward_input", num_stages),
        divided.per_stage("backward_weight", num_stages),
    )
    factors = [(i + w) / b for i, w, b in zip(on_input, on_weight, both, strict=True)]
    return StageCosts(
        forward=undivided.forward,
        backward_input=[i / factor for i, factor in zip(on_input, factors, strict=True)],
        backward_weight=[w / factor for w, factor in zip(on_weight, factors, strict=True)],
        split_factor=factors,
    )


def _make_stage(num_stages: int, index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS[num_stages][index])
        )
    )
