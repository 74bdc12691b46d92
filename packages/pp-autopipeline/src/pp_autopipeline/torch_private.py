"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0."""

from torch.distributed.device_mesh import DeviceMesh


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was cut from, or the mesh itself."""
    return mesh._get_root_mesh()
