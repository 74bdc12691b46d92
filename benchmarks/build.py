"""What `AutoPipeline.build` costs: its time and the memory it adds, beside the size of the model.

    torchrun --nproc-per-node=2 benchmarks/build.py

A Llama with 8 layers, hidden size 1024 and a vocabulary of 32000 in float32, once with weights and
once on the meta device. A copy of the model per stage would show as added memory of the stage's
size or more. Linux only: the peak of the resident memory is read and reset in /proc.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from pp_autopipeline import AutoPipeline, init_empty_weights, initialize_distributed


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def resident(which: str) -> int:
    """Bytes of resident memory: `VmRSS` now or `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024


def measure(empty: bool) -> dict[str, float]:
    """Build once; the first build of a process also imports what tracing needs, so build twice."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    if empty:
        with init_empty_weights():
            model = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, start = resident("VmRSS"), time.perf_counter()
    ap = AutoPipeline(mesh, pp_batch_size=8).build(model, loss_fn=loss_fn)
    seconds, added = time.perf_counter() - start, resident("VmHWM") - before
    return {
        "model_mb": sum(p.numel() * 4 for p in model.parameters()) / 1e6,
        "stage_mb": sum(p.numel() * 4 for part in ap.parts for p in part.parameters()) / 1e6,
        "build_seconds": seconds,
        "peak_added_mb": added / 1e6,
    }


def main() -> None:
    """Measure on every rank and print a table on the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    initialize_distributed(timeout_minutes=5)
    torch.set_num_threads(1)
    figures = []
    for name, empty in (("first", False), ("weights", False), ("meta", True)):
        mine = {"run": name, "rank": dist.get_rank(), **measure(empty)}
        everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        figures += everyone
    if dist.get_rank() == 0:
        print(
            f"{'run':<10}{'rank':>5}{'model MB':>10}{'stage MB':>10}{'seconds':>9}{'added MB':>10}"
        )
        for row in figures:
            print(
                f"{row['run']:<10}{row['rank']:>5}{row['model_mb']:>10.1f}{row['stage_mb']:>10.1f}"
                f"{row['build_seconds']:>9.2f}{row['peak_added_mb']:>10.1f}"
            )
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
