"""A model of one's own, its stages built by hand, under every schedule.

    torchrun --nproc-per-node=2 custom_model.py

Needs pp-schedule alone.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_schedule import (
    build_pipeline_schedule,
    calculate_virtual_stages,
    clip_grad_norm,
    draw_text,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)

VOCAB, HIDDEN, LAYERS, BATCH, LENGTH = 64, 32, 8, 8, 16
SCHEDULES = (
    "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule", "dualpipev",
)  # fmt: skip


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to [B, S, H]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def make_stage(index: int, num_stages: int) -> nn.Module:
    """Layers of one stage; the first also embeds, the last also predicts."""
    first, last = index * LAYERS // num_stages, (index + 1) * LAYERS // num_stages
    modules: list[nn.Module] = [nn.Embedding(VOCAB, HIDDEN)] if index == 0 else []
    for layer in range(first, last):
        torch.manual_seed(layer)  # the same layer has the same weights in every split
        modules.append(Block())
    if index == num_stages - 1:
        torch.manual_seed(LAYERS)
        modules += [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)]
    return nn.Sequential(*modules)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(name: str) -> None:
    """A few steps under one schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    spec = resolve_schedule(name)
    num_stages, _ = calculate_virtual_stages(LAYERS, None, size, spec.single_stage)
    torch.manual_seed(-1)
    mine = stage_ids_this_rank(rank, size, num_stages, spec.style)
    parts = [make_stage(index, num_stages) for index in mine]
    stages = [
        PipelineStage(part, index, num_stages, torch.device("cpu"))
        for part, index in zip(parts, mine, strict=True)
    ]
    schedule = build_pipeline_schedule(
        pipeline_parallel_schedule_csv=None,
        pipeline_parallel_schedule=name,
        microbatch_size=1,
        local_batch_size=BATCH,
        stages=stages,
        loss_fn=loss_fn,
        scale_grads=True,  # the loss is a mean over its microbatch
    )
    optimizer = torch.optim.SGD((p for part in parts for p in part.parameters()), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    history = []
    for _ in range(3):
        losses: list[torch.Tensor] = []
        inputs = (text[:, :-1],) if 0 in mine else ()
        target = text[:, 1:] if num_stages - 1 in mine else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        clip_grad_norm(1.0, parts)
        optimizer.step()
        optimizer.zero_grad()
        history += [f"{sum(losses).item() / BATCH:.4f}"] if losses else []
    if rank == 0:
        order = schedule_order(schedule)
        print(f"\n{name}: expected bubble {100 * simulate(order).bubble_fraction:.1f} %")
        print(draw_text(order), flush=True)
    dist.barrier()
    if history:
        print(f"{name}: losses {', '.join(history)}", flush=True)


def main() -> None:
    """Train under every schedule in turn."""
    dist.init_process_group("gloo")
    for name in SCHEDULES:
        train(name)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    main()
