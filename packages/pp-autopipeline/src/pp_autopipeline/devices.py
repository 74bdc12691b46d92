"""What a user may mean by a device."""

import torch
from torch.distributed.device_mesh import DeviceMesh


def resolve_device(device: torch.device | str | int | None, mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's stages.

    Args:
        device: A device, its name, or an index such as `torch.cuda.current_device()` returns; None
            means the current device of the mesh's type.
        mesh: The mesh of the pipeline.

    Raises:
        ValueError: If its type is not the mesh's.
    """
    if device is None:
        if mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(mesh.device_type)
    if isinstance(device, int) and mesh.device_type == "cpu":
        raise ValueError(f"device={device} names an accelerator, but world_mesh is on the CPU")
    resolved = torch.device(device)
    if resolved.type != mesh.device_type:
        raise ValueError(
            f"device={str(resolved)!r} is not of world_mesh's type {mesh.device_type!r}"
        )
    return resolved
