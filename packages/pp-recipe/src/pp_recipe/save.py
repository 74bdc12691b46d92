"""All stages' weights, as one Hugging Face checkpoint."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from pp_split_hf import init_empty_weights


def save_checkpoint(
    parts: Iterable[nn.Module],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    device: torch.device,
) -> None:
    """Gather the stages on rank 0 and write them as one checkpoint; every rank must call it.

    The folder is complete or absent: it is written aside, then renamed.

    Args:
        parts: This rank's stages; their parameters bear the whole model's names.
        config: The whole model's config.
        tokenizer: Saved along, so that the folder can be trained further.
        folder: Replaced if it exists.
        device: Where the process group moves tensors.
    """
    state_dict = _gather(parts, device)
    if dist.get_rank() != 0:
        return
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    # A tied weight is one tensor in a checkpoint.
    once = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in once:
            state_dict.pop(name, None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        new, old = Path(aside, "new"), Path(aside, "old")
        model.save_pretrained(new, state_dict=state_dict)
        tokenizer.save_pretrained(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def _gather(parts: Iterable[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return every rank's tensors on rank 0, on the CPU; elsewhere only this rank's own."""
    own = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    gathered = {name: tensor.cpu() for name, tensor in own.items()}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kinds: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(world_size)]
    dist.all_gather_object(kinds, {name: (t.shape, t.dtype) for name, t in own.items()})
    # One tensor at a time, so that rank 0 needs room for one more than the model.
    for source in range(1, world_size):
        for name, (shape, dtype) in kinds[source].items():
            if rank == source:
                dist.send(own[name].contiguous(), dst=0)
            elif rank == 0:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(tensor, src=source)
                gathered[name] = tensor.cpu()
    return gathered
