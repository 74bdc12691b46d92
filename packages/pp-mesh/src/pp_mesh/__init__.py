"""Which rank is where: sizes to DeviceMesh, and process-group start-up."""

from pp_mesh.mesh import Meshes, build_mesh
from pp_mesh.sizes import ParallelSizes
from pp_mesh.startup import DistInfo, destroy_distributed, initialize_distributed

__all__ = [
    "DistInfo",
    "Meshes",
    "ParallelSizes",
    "build_mesh",
    "destroy_distributed",
    "initialize_distributed",
]
