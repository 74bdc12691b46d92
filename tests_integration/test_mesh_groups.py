"""What only real process groups show of pp_mesh."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RankPool

from pp_mesh import ParallelSizes, build_mesh


def wait_for_nobody(axis: str, minutes: float) -> float:
    """Seconds until a receive that nobody answers fails on the last rank of the axis."""
    cp = {"cp_size": 2, "cp_ring_size": 2} if axis == "cp_ring" else {}
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2, **cp), timeout_minutes=minutes)
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


@pytest.mark.parametrize("axis", ["pp", "dp", "ep", "cp_ring"])
def test_the_timeout_holds_for_receives(ranks: RankPool, axis: str) -> None:
    seconds = ranks.run(4, wait_for_nobody, axis, 1 / 60)
    assert sum(0.9 < each < 2.5 for each in seconds) == 2


AXES = ("pp", "dp_replicate", "dp_shard", "cp_ring", "cp_ulysses", "tp")
FLATTENED = ("dp", "cp", "dp_cp", "dp_shard_cp")


def timeouts(chosen: list[int] | None) -> dict[str, timedelta]:
    """The timeout of the group of each axis; empty outside the mesh."""
    sizes = ParallelSizes(pp_size=2, cp_size=2, cp_ulysses_size=2, ep_size=2)
    meshes = build_mesh(sizes, timeout_minutes=0.75, ranks=chosen)
    if chosen is not None and dist.get_rank() not in chosen:
        return {}
    assert meshes.moe_mesh is not None
    groups = {name: meshes.world_mesh.get_group(name) for name in AXES + FLATTENED}
    groups |= {name: meshes.moe_mesh.get_group(name) for name in ("ep", "ep_shard")}
    groups |= {"moe pp": meshes.moe_mesh.get_group("pp")}
    if chosen is not None:
        groups["all"] = meshes.group
    cpu = torch.device("cpu")
    return {name: each._get_backend(cpu).options._timeout for name, each in groups.items()}


@pytest.mark.parametrize("chosen", [None, [0, 2, 3, 5]])
def test_every_group_has_the_timeout(ranks: RankPool, chosen: list[int] | None) -> None:
    found = ranks.run(6 if chosen else 4, timeouts, chosen)
    for rank in chosen or range(4):
        assert set(found[rank].values()) == {timedelta(seconds=45)}


def sums(chosen: list[int]) -> dict[str, float]:
    """The sum of global ranks over each axis; empty outside the mesh."""
    sizes = ParallelSizes(pp_size=2, cp_size=2, cp_ring_size=2, ep_size=2)
    meshes = build_mesh(sizes, timeout_minutes=0.5, ranks=chosen)
    again, _ = build_mesh(ParallelSizes(pp_size=2), timeout_minutes=0.5)
    dist.all_reduce(torch.ones(1), group=again["dp"].get_group())
    if dist.get_rank() not in chosen:
        return {}
    world_mesh, moe_mesh = meshes
    assert moe_mesh is not None
    groups = {name: world_mesh.get_group(name) for name in ("pp", "dp", "cp_ring", "cp", "dp_cp")}
    groups |= {"ep": moe_mesh.get_group("ep"), "group": meshes.group}
    found = {}
    for name, group in groups.items():
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=group)
        found[name] = total.item()
    return found


def test_ranks_outside_the_mesh_take_part_in_making_it(ranks: RankPool) -> None:
    found = ranks.run(6, sums, [0, 2, 3, 5])
    assert found[1] == found[4] == {}
    both = {"dp_cp", "cp", "cp_ring", "ep"}
    assert found[0] == {"pp": 3, "dp": 0, "group": 10} | dict.fromkeys(both, 2)
    assert found[5] == {"pp": 7, "dp": 5, "group": 10} | dict.fromkeys(both, 8)
