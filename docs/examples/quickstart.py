"""AutoPipeline in a training loop of one's own.

    torchrun --nproc-per-node=2 quickstart.py

Runs on CPUs and on GPUs as it is.
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights
from transformers.utils import ContextManagers

from pp_autopipeline import (
    AutoPipeline,
    clip_grad_norm,
    init_empty_weights,
    initialize_distributed,
)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of one microbatch; -100 does not count."""
    return F.cross_entropy(
        logits.float().view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100
    )


def main() -> None:
    """Build, show and train."""
    # 1. Who am I? Then a mesh with one axis, the pipeline.
    dist_info = initialize_distributed()
    world_mesh = init_device_mesh(
        dist_info.device.type, mesh_shape=(dist_info.world_size,), mesh_dim_names=("pp",)
    )

    # 2. The whole model on the meta device: its structure, and no memory.
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=5,
        num_attention_heads=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with ContextManagers([no_init_weights(), init_empty_weights()]):
        model = AutoModelForCausalLM.from_config(config)

    # 3. This rank's stages of it.
    ap = AutoPipeline(
        world_mesh=world_mesh,
        pp_axis_name="pp",
        pp_schedule="1f1b",
        pp_microbatch_size=1,
        pp_batch_size=8,
        device=dist_info.device,
        dtype=torch.float32,
    ).build(model, loss_fn=loss_fn)

    # 4. Weights, made from the config: the same whatever the number of ranks.
    ap.materialize(seed=0)

    if dist_info.is_main:
        print(ap.debug_summary())
        print(ap.pretty_print_stages())

    # 5. The loop. Every rank passes the whole batch, and every rank gets its loss.
    optimizer = torch.optim.AdamW(ap.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (8, 33), generator=generator)
    for step in range(3):
        loss = ap.step(text[:, :-1], target=text[:, 1:]).loss
        norm = clip_grad_norm(1.0, ap.parts, device_mesh=world_mesh, pp_axis_name="pp")
        optimizer.step()
        optimizer.zero_grad()
        if dist_info.is_main:
            print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
