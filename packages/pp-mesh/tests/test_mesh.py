import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pp_mesh import Meshes, ParallelSizes, build_mesh

WORLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def world_axes(sizes: ParallelSizes) -> dict[str, int]:
    if sizes.cp_ring_size is None or sizes.cp_ulysses_size is None:
        cp = {"cp": sizes.cp_size}
    else:
        cp = {"cp_ring": sizes.cp_ring_size, "cp_ulysses": sizes.cp_ulysses_size}
    dp = {"dp_replicate": sizes.dp_replicate_size, "dp_shard": sizes.dp_shard_size}
    return {"pp": sizes.pp_size, **dp, **cp, "tp": sizes.tp_size}


def groups(axes: dict[str, int], chosen: tuple[str, ...], ranks: list[int]) -> list[list[int]]:
    """The groups over the chosen axes, by hand: ranks that agree in every other place."""
    found: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(size) for size in axes.values()))
    for rank, place in zip(ranks, places, strict=True):
        others = zip(axes, place, strict=True)
        rest = tuple(index for name, index in others if name not in chosen)
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def expert_groups(sizes: ParallelSizes, ranks: list[int]) -> dict[str, list[list[int]]]:
    """By hand: runs of neighbours among those a stage's experts may spread over."""
    assert sizes.dp_size is not None
    found: dict[str, list[list[int]]] = {"ep": [], "ep_shard": []}
    room = sizes.dp_size * sizes.cp_size
    stage_size = room * sizes.tp_size
    for stage in range(sizes.pp_size):
        here = ranks[stage * stage_size : (stage + 1) * stage_size]
        spread = [here[index :: sizes.tp_size] for index in range(sizes.tp_size)]
        for among in spread if room % sizes.ep_size == 0 else [here]:
            runs = [among[i : i + sizes.ep_size] for i in range(0, len(among), sizes.ep_size)]
            found["ep"] += runs
            found["ep_shard"] += map(list, zip(*runs, strict=True))
    return found


def expected_groups(sizes: ParallelSizes, ranks: list[int]) -> dict[str, list[list[int]]]:
    """All groups of each axis of the world mesh, flattened ones too."""
    axes = world_axes(sizes)
    cp = tuple(name for name in axes if name.startswith("cp"))
    flattened = {
        "cp": cp,
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", *cp),
        "dp_cp": ("dp_replicate", "dp_shard", *cp),
    }
    chosen = {name: (name,) for name in axes} | flattened
    return {name: groups(axes, parts, ranks) for name, parts in chosen.items()}


def check_axis(mesh: DeviceMesh, name: str, members: list[int], rank: int) -> None:
    group = mesh.get_group(name)
    assert dist.get_process_group_ranks(group) == members, name
    assert mesh.get_local_rank(name) == dist.get_rank(group) == members.index(rank), name
    taken = mesh[name]
    assert taken.mesh.tolist() == members, name
    assert taken.get_group() == group
    assert taken.size() == len(members)


def check_sizes(meshes: Meshes, sizes: ParallelSizes) -> None:
    for name in (
        *("pp_size", "tp_size", "cp_size", "dp_size", "dp_shard_size", "dp_replicate_size"),
        *("ep_size", "cp_ulysses_size"),
    ):
        assert getattr(meshes, name) == getattr(sizes, name), name
    assert meshes.cp_ring_size == (sizes.cp_ring_size or 1)
    assert meshes.pp_enabled == (sizes.pp_size > 1)


def check_layout(
    sizes: ParallelSizes, world_size: int, ranks: list[int], some: Iterable[int]
) -> None:
    """Compares all that a mesh says on some of its ranks with what is expected of it."""
    resolved = sizes.resolve(len(ranks))
    expected = expected_groups(resolved, ranks)
    experts = expert_groups(resolved, ranks)
    for each in [*expected.values(), *experts.values()]:
        assert sorted(itertools.chain(*each)) == ranks
    for rank in some:
        with fake_world(rank, world_size):
            meshes = build_mesh(sizes, ranks=None if len(ranks) == world_size else ranks)
            world_mesh, moe_mesh = meshes
            check_sizes(meshes, resolved)
            assert world_mesh.mesh_dim_names == tuple(world_axes(resolved))
            assert dist.get_process_group_ranks(meshes.group) == ranks
            for name, all_groups in expected.items():
                members = next(group for group in all_groups if rank in group)
                check_axis(world_mesh, name, members, rank)
            assert (moe_mesh is None) == (resolved.ep_size == 1)
            if moe_mesh is not None:
                assert moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep")
                assert moe_mesh.get_local_rank("pp") == world_mesh.get_local_rank("pp")
                for name, all_groups in experts.items():
                    members = next(group for group in all_groups if rank in group)
                    check_axis(moe_mesh, name, members, rank)


def divisor(of: int, draw: random.Random) -> int:
    return draw.choice([n for n in range(1, of + 1) if of % n == 0])


def any_sizes(world_size: int, draw: random.Random) -> ParallelSizes:
    """Sizes that fill the world, every axis drawn."""
    drawn = {}
    left = world_size
    for name in draw.sample(["pp_size", "tp_size", "cp_size"], 3):
        drawn[name] = divisor(min(left, 8) if left % 8 == 0 else left, draw)
        left //= drawn[name]
    room = left * drawn["cp_size"] * draw.choice([1, drawn["tp_size"]])
    given = draw.choice([(), (), ("cp_ring_size",), ("cp_ulysses_size",)])
    return ParallelSizes(
        **drawn,
        dp_size=draw.choice([None, left]),
        dp_replicate_size=divisor(left, draw),
        ep_size=draw.choice([1, divisor(room, draw)]),
        **{name: divisor(drawn["cp_size"], draw) for name in given},
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_axis_has_the_ranks_that_arithmetic_says(world_size: int) -> None:
    draw = random.Random(world_size)
    for _ in range(16):
        some = {0, world_size - 1, draw.randrange(world_size)}
        check_layout(any_sizes(world_size, draw), world_size, list(range(world_size)), some)


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(pp_size=8, tp_size=4, cp_size=2, dp_replicate_size=2),
        ParallelSizes(pp_size=4, cp_size=2, dp_replicate_size=2, ep_size=64),
        ParallelSizes(pp_size=4, tp_size=8, dp_replicate_size=2, ep_size=16),
        ParallelSizes(pp_size=4, tp_size=8, ep_size=128),  # EP takes the TP ranks in
        ParallelSizes(pp_size=2, tp_size=4, cp_size=16, cp_ring_size=4, ep_size=8),
        ParallelSizes(tp_size=512),
        ParallelSizes(pp_size=512),
    ],
    ids=str,
)
def test_512_ranks(sizes: ParallelSizes) -> None:
    check_layout(sizes, 512, list(range(512)), (0, 1, 70, 255, 300, 511))


def test_all_ranks_of_all_axes_at_once() -> None:
    sizes = ParallelSizes(
        pp_size=2, tp_size=2, cp_size=4, cp_ring_size=2, dp_replicate_size=2, ep_size=4
    )
    check_layout(sizes, 64, list(range(64)), range(64))


@pytest.mark.parametrize("world_size", [4, 8, 30, 100, 512])
def test_some_of_the_ranks(world_size: int) -> None:
    draw = random.Random(world_size)
    for size in [n for n in (1, 2, 4, 8, 24, 96, 256) if n < world_size]:
        ranks = sorted(draw.sample(range(world_size), size))
        sizes = any_sizes(size, draw)
        check_layout(sizes, world_size, ranks, {ranks[0], ranks[-1], draw.choice(ranks)})
        outside = draw.choice([rank for rank in range(world_size) if rank not in ranks])
        with fake_world(outside, world_size):
            meshes = build_mesh(sizes, ranks=ranks)
            assert meshes.world_mesh.get_coordinate() is None
            check_sizes(meshes, sizes.resolve(size))
            with pytest.raises(RuntimeError, match=rf"rank {outside} is not .* {size} ranks"):
                _ = meshes.group


def test_a_picture_by_hand() -> None:
    """The 16 ranks of the documentation, written out rather than computed."""
    sizes = ParallelSizes(pp_size=2, dp_replicate_size=2, tp_size=2, ep_size=2)
    with fake_world(11, 16):
        world_mesh, moe_mesh = build_mesh(sizes)
        assert moe_mesh is not None
        assert world_mesh.get_coordinate() == (1, 0, 1, 0, 1)
        found = {
            name: dist.get_process_group_ranks(mesh.get_group(name))
            for mesh, names in (
                (world_mesh, ("dp_replicate", "dp_shard", "dp", "cp", "tp")),
                (moe_mesh, ("pp", "ep_shard", "ep")),
            )
            for name in names
        }
    assert found == {
        "pp": [3, 11],
        "dp_replicate": [11, 15],
        "dp_shard": [9, 11],
        "dp": [9, 11, 13, 15],
        "cp": [11],
        "tp": [10, 11],
        "ep_shard": [11, 15],
        "ep": [9, 11],
    }


def test_hsdp_takes_copies_and_shards_in_one_slice() -> None:
    with fake_world(13, 32):
        sizes = ParallelSizes(pp_size=2, cp_size=2, dp_replicate_size=2, tp_size=2)
        world_mesh = build_mesh(sizes).world_mesh
        # Stage 0 has ranks 0 to 15, copies of it 0 to 7 and 8 to 15; TP rank 1 has the odd ones.
        assert world_mesh["dp_replicate", "dp_shard_cp"].mesh.tolist() == [
            [1, 3, 5, 7],
            [9, 11, 13, 15],
        ]


def test_meshes_from_elsewhere() -> None:
    def mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
        ranks = torch.arange(torch.Size(shape).numel()).view(shape)
        return DeviceMesh("cpu", ranks, mesh_dim_names=names)

    def read(meshes: Meshes) -> tuple[object, ...]:
        return (
            *(meshes.pp_size, meshes.pp_enabled, meshes.dp_size, meshes.dp_replicate_size),
            *(meshes.dp_shard_size, meshes.cp_size, meshes.cp_ring_size, meshes.cp_ulysses_size),
            *(meshes.tp_size, meshes.ep_size),
        )

    with fake_world(3, 8):
        data = mesh(("dp",), (8,))
        assert read(Meshes(data)) == (1, False, 8, None, 1, 1, 1, None, 1, 1)
        plain = mesh(("pp", "dp", "tp"), (2, 2, 2))
        assert read(Meshes(plain)) == (2, True, 2, None, 1, 1, 1, None, 2, 1)
        experts = mesh(("ep_shard", "ep"), (2, 4))
        hybrid = Meshes(mesh(("dp_replicate", "dp_shard"), (4, 2)), experts)
        assert read(hybrid) == (1, False, 8, 4, 2, 1, 1, None, 1, 4)
        sharded = mesh(("dp_shard", "cp_ring", "cp_ulysses"), (2, 2, 2))
        assert read(Meshes(sharded)) == (1, False, 2, None, 2, 4, 2, 2, 1, 1)
        other = mesh(("stage", "a", "b"), (2, 2, 2))
        assert read(Meshes(other)) == (1, False, None, None, 1, 1, 1, None, 1, 1)
        other["a", "b"]._flatten("dp")
        assert Meshes(other).dp_size == 4
        assert Meshes(other, experts).group is dist.group.WORLD

        half = mesh(("pp", "dp"), (2, 2))
        with pytest.raises(RuntimeError, match=r"4 of the job's 8 ranks .* \('pp', 'dp'\).*ranks="):
            _ = Meshes(half).group
        half._flatten("everything")
        assert dist.get_process_group_ranks(Meshes(half).group) == [0, 1, 2, 3]
        line = Meshes(mesh(("dp",), (4,)))
        assert line.group == line.world_mesh.get_group()


def test_bad_arguments() -> None:
    with pytest.raises(RuntimeError, match="initialize_distributed"):
        build_mesh(ParallelSizes())
    with fake_world(0, 4):
        with pytest.raises(ValueError, match="do not fit 3 ranks"):
            build_mesh(ParallelSizes(pp_size=2), ranks=[0, 1, 2])
        with pytest.raises(ValueError, match=r"ranks \[1.0, True\] are not integers"):
            build_mesh(ParallelSizes(), ranks=[0, 1.0, True])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"ranks=\[\] must be ascending, each once, at least"):
            build_mesh(ParallelSizes(), ranks=[])
        for never in (0, float("inf"), float("nan"), "5", True):
            with pytest.raises(ValueError, match=f"timeout_minutes={never!r} must be a number"):
                build_mesh(ParallelSizes(), timeout_minutes=never)  # type: ignore[arg-type]


def test_all_bad_arguments_at_once() -> None:
    with fake_world(0, 4), pytest.raises(TypeError, match="build_mesh") as caught:
        build_mesh(ParallelSizes(tp_size="2"), "cuda:0", 0, [9, 1])  # type: ignore[arg-type]
    message = str(caught.value)
    assert "timeout_minutes=0 must be" in message
    assert "device_type='cuda:0' has no backend in the process group, which serves cpu" in message
    assert "ranks=[9, 1] must be ascending" in message
    assert "ranks [9] do not exist: the world size is 4" in message
    assert "tp_size='2' must be an integer" in message


def test_meta_default_device_does_not_matter() -> None:
    with fake_world(1, 4), torch.device("meta"):
        assert build_mesh(ParallelSizes(pp_size=2)).world_mesh["dp"].get_local_rank() == 1
