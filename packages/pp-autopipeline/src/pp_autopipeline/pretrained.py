"""A Hugging Face checkpoint into the stages of a built pipeline, and out of them again."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pp_autopipeline.pipeline import BuiltPipeline
from pp_autopipeline.torch_private import root_mesh
from pp_split_hf import (
    AllOrNone,
    CheckpointError,
    CheckpointWeights,
    Saveable,
    save_pretrained_pipeline,
    stage_part,
)


def load_pretrained(
    built: BuiltPipeline,
    mesh: DeviceMesh,
    checkpoint: str | Path,
    device: torch.device,
    dtype: torch.dtype | None,
    allow_missing: bool,
    allow_unexpected: bool,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Read the weights of this rank's stages; see `AutoPipeline.load_pretrained`."""
    ranks = AllOrNone(_group(root_mesh(mesh)))
    part = stage_part(built.parts[0])
    assert part is not None
    # 1. Everything that can be wrong is found before anything is read.
    with ranks.step(f"cannot load {checkpoint}", error=CheckpointError):
        weights = CheckpointWeights(part.skeleton, checkpoint)
        if problems := weights.problems(built.parts, allow_missing, allow_unexpected):
            raise CheckpointError("\n  ".join(problems))
    # 2. What this rank owns.
    with ranks.step(f"cannot load {checkpoint}"):
        weights.load(built.parts, device, dtype, progress)
    built.tied.reshare()


def save_pretrained(
    built: BuiltPipeline,
    mesh: DeviceMesh,
    pp_axis_name: str,
    path: str | Path,
    tokenizer: Saveable | None,
    max_shard_size: int,
) -> None:
    """Write all stages as one checkpoint; see `AutoPipeline.save_pretrained`."""
    mesh = root_mesh(mesh)  # a slice of it does not know its replicas
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None
    others = [i for name, i in zip(names, coordinate, strict=True) if name != pp_axis_name]
    save_pretrained_pipeline(
        built.parts,
        path,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        group=_group(mesh),
        is_writer=not any(others),
    )


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of all ranks of a mesh; None for all of the job."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    if ranks not in _groups:
        made = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _groups[ranks] = made
    return _groups[ranks]
