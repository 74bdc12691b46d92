"""What only real process groups show of pp_mesh."""

import time

import pytest
import torch
import torch.distributed as dist
from harness import RankPool

from pp_mesh import ParallelSizes, build_mesh


def wait_for_nobody(axis: str, minutes: float) -> float:
    """Seconds until a receive that nobody answers fails on the last rank of the axis."""
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2), timeout_minutes=minutes)
    mesh = meshes.moe_mesh if axis == "ep" else meshes.world_mesh
    assert mesh is not None
    group = mesh[axis].get_group()
    dist.barrier()
    start = time.monotonic()
    if mesh[axis].get_local_rank() == 0:
        time.sleep(minutes * 60 + 2)
    else:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.recv(torch.zeros(1), group=group, group_src=0)
    return time.monotonic() - start


@pytest.mark.parametrize("axis", ["pp", "dp", "ep"])
def test_the_timeout_holds_for_receives(ranks: RankPool, axis: str) -> None:
    seconds = ranks.run(4, wait_for_nobody, axis, 1 / 60)
    assert sum(0.9 < each < 2.5 for each in seconds) == 2


def sums(chosen: list[int]) -> dict[str, float]:
    """The sum of global ranks over each axis; empty outside the mesh."""
    sizes = ParallelSizes(pp_size=2, ep_size=2)
    world_mesh, moe_mesh = build_mesh(sizes, timeout_minutes=0.5, ranks=chosen)
    again, _ = build_mesh(ParallelSizes(pp_size=2), timeout_minutes=0.5)
    dist.all_reduce(torch.ones(1), group=again["dp"].get_group())
    if dist.get_rank() not in chosen:
        return {}
    assert moe_mesh is not None
    found = {}
    for name, mesh in {
        "pp": world_mesh,
        "dp": world_mesh,
        "dp_cp": world_mesh,
        "ep": moe_mesh,
    }.items():
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=mesh[name].get_group())
        found[name] = total.item()
    return found


def test_ranks_outside_the_mesh_take_part_in_making_it(ranks: RankPool) -> None:
    found = ranks.run(6, sums, [0, 2, 3, 5])
    assert found[1] == found[4] == {}
    assert found[0] == {"pp": 3, "dp": 2, "dp_cp": 2, "ep": 2}
    assert found[5] == {"pp": 7, "dp": 8, "dp_cp": 8, "ep": 8}
