"""Draws the pictures of the docs again: `uv run python docs/pictures/make.py`."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from pp_schedule import (
    build_pipeline_schedule,
    draw_png,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)

RANKS, MICROBATCHES = 4, 8


def main() -> None:
    """One picture per schedule, four ranks and eight microbatches."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    for name in ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv"):
        spec = resolve_schedule(name)
        num_stages = RANKS if spec.single_stage else 2 * RANKS
        stages = [
            PipelineStage(nn.Identity(), index, num_stages, torch.device("cpu"))
            for index in stage_ids_this_rank(0, RANKS, num_stages, spec.style)
        ]
        schedule = build_pipeline_schedule(None, name, 1, MICROBATCHES, stages, None)
        path = Path(__file__).with_name(f"{spec.name}.png")
        title = f"{name}, {RANKS} ranks, {num_stages} stages, {MICROBATCHES} microbatches"
        draw_png(schedule_order(schedule), path, title=title)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
