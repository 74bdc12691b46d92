from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pp_mesh import ParallelSizes, build_mesh


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def coordinates(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """The rank's place, by hand: the last axis varies fastest."""
    place = {}
    axes = {
        "tp": sizes.tp_size,
        "cp": sizes.cp_size,
        "dp_shard": sizes.dp_shard_size,
        "dp_replicate": sizes.dp_replicate_size,
        "pp": sizes.pp_size,
    }
    for name, size in axes.items():
        rank, place[name] = divmod(rank, size)
    return place


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, ParallelSizes()),
        (8, ParallelSizes(pp_size=2, dp_replicate_size=2)),
        (64, ParallelSizes(pp_size=4, tp_size=2, cp_size=2, dp_replicate_size=2)),
        (512, ParallelSizes(pp_size=8, tp_size=4, cp_size=2, dp_replicate_size=2)),
    ],
)
def test_world_mesh(world_size: int, sizes: ParallelSizes) -> None:
    resolved = sizes.resolve(world_size)
    for rank in {0, world_size // 3, world_size - 1}:
        with fake_world(rank, world_size):
            mesh, moe_mesh = build_mesh(sizes)
            assert moe_mesh is None
            assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            place = coordinates(rank, resolved)
            for name, index in place.items():
                assert mesh[name].get_local_rank() == index
                assert mesh.get_local_rank(name) == index
            dp = place["dp_replicate"] * resolved.dp_shard_size + place["dp_shard"]
            assert mesh["dp"].size() == resolved.dp_size
            assert mesh["dp"].get_local_rank() == dp
            assert mesh["dp_cp"].get_local_rank() == dp * resolved.cp_size + place["cp"]
            assert mesh["dp_shard_cp"].size() == resolved.dp_shard_size * resolved.cp_size
            assert mesh["dp"].get_group().size() == resolved.dp_size
            assert mesh["dp_replicate", "dp_shard"].size() == resolved.dp_size


@pytest.mark.parametrize(
    ("world_size", "sizes", "rank", "ep_ranks"),
    [
        # EP inside DP x CP, TP ranks apart.
        (16, ParallelSizes(pp_size=2, tp_size=2, ep_size=4), 3, [1, 3, 5, 7]),
        (16, ParallelSizes(pp_size=2, tp_size=2, ep_size=2), 6, [4, 6]),
        # EP 8 does not divide DP x CP = 4, so it takes TP in.
        (16, ParallelSizes(pp_size=2, tp_size=2, ep_size=8), 9, list(range(8, 16))),
        (512, ParallelSizes(pp_size=4, cp_size=2, dp_replicate_size=2, ep_size=64), 70, None),
    ],
)
def test_moe_mesh(
    world_size: int, sizes: ParallelSizes, rank: int, ep_ranks: list[int] | None
) -> None:
    with fake_world(rank, world_size):
        world_mesh, moe_mesh = build_mesh(sizes)
        assert moe_mesh is not None
        assert moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep")
        assert moe_mesh["ep"].size() == sizes.ep_size
        assert moe_mesh["pp"].get_local_rank() == world_mesh["pp"].get_local_rank()
        ranks = dist.get_process_group_ranks(moe_mesh["ep"].get_group())
        assert ranks == (ep_ranks or list(range(64, 128)))


def test_every_rank_is_in_exactly_one_group_of_each_axis() -> None:
    sizes = ParallelSizes(pp_size=2, tp_size=2, cp_size=2, dp_replicate_size=2, ep_size=4)
    groups: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(32):
        with fake_world(rank, 32):
            world_mesh, moe_mesh = build_mesh(sizes)
            assert moe_mesh is not None
            named = {name: world_mesh[name] for name in ("pp", "dp", "cp", "tp", "dp_cp")}
            named |= {name: moe_mesh[name] for name in ("ep_shard", "ep")}
            for name, mesh in named.items():
                members = tuple(dist.get_process_group_ranks(mesh.get_group()))
                assert rank in members
                groups.setdefault(name, set()).add(members)
    for members_of in groups.values():
        assert sorted(rank for members in members_of for rank in members) == list(range(32))


def test_some_of_the_ranks() -> None:
    ranks = [1, 3, 5, 7]
    with fake_world(5, 8):
        mesh, _ = build_mesh(ParallelSizes(pp_size=2), ranks=ranks)
        assert mesh.mesh.flatten().tolist() == ranks
        assert mesh["pp"].get_local_rank() == 1
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [5, 7]
    with fake_world(2, 8):
        mesh, _ = build_mesh(ParallelSizes(pp_size=2, ep_size=2), ranks=ranks)
        assert mesh.get_coordinate() is None


def test_bad_arguments() -> None:
    with pytest.raises(RuntimeError, match="initialize_distributed"):
        build_mesh(ParallelSizes())
    with fake_world(0, 4):
        with pytest.raises(ValueError, match=r"timeout_minutes=0 .*ascending.*\[9\] do not exist"):
            build_mesh(ParallelSizes(), timeout_minutes=0, ranks=[9, 1])
        with pytest.raises(ValueError, match="do not fit 3 ranks"):
            build_mesh(ParallelSizes(pp_size=2), ranks=[0, 1, 2])


def test_meta_default_device_does_not_matter() -> None:
    with fake_world(1, 4), torch.device("meta"):
        assert build_mesh(ParallelSizes(pp_size=2)).world_mesh["dp"].get_local_rank() == 1
