from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pp_autopipeline import DataParallelSampler, ParallelSizes, build_mesh


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def samplers(num_rows: int, replicas: int, **settings: Any) -> list[DataParallelSampler]:
    """A sampler for each replica, of the data set 0, 1, ..."""
    made = []
    for rank in range(replicas):
        with fake_world(rank, replicas):
            mesh = init_device_mesh("cpu", (1, replicas), mesh_dim_names=("pp", "dp"))
            made.append(DataParallelSampler(range(num_rows), mesh, **settings))
    return made


def on_axes(mesh: DeviceMesh, *names: str) -> tuple[int, int]:
    """This rank's place along the axes and their size, from the mesh's coordinates."""
    all_names, where = mesh.mesh_dim_names, mesh.get_coordinate()
    assert all_names is not None
    assert where is not None
    place, size = 0, 1
    for name in names:
        dim = all_names.index(name)
        place, size = place * mesh.size(dim) + where[dim], size * mesh.size(dim)
    return place, size


@pytest.mark.parametrize("rank", range(16))
def test_rows_depend_on_the_data_parallel_coordinate_alone(rank: int) -> None:
    sizes = ParallelSizes(pp_size=2, dp_size=4, dp_replicate_size=2, tp_size=2)
    hsdp = ("dp_replicate", "dp_shard")
    with fake_world(rank, 16):
        mesh = build_mesh(sizes, device_type="cpu").world_mesh
        place, size = on_axes(mesh, *hsdp)
        for axes in (("dp",), hsdp):
            sampler = DataParallelSampler(range(10), mesh, axes)
            assert (sampler.rank, sampler.num_replicas) == (place, size)
        inner = DataParallelSampler(range(10), mesh, ("dp_shard",))
        assert (inner.rank, inner.num_replicas) == on_axes(mesh, "dp_shard")


def test_a_mesh_without_data_parallelism_is_one_replica() -> None:
    with fake_world(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        assert list(DataParallelSampler(range(5), mesh, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "drop_last"),
    [(1, False), (4, False), (10, False), (12, False), (4, True), (10, True), (12, True)],
)
def test_orders_are_those_of_torchs_sampler(num_rows: int, shuffle: bool, drop_last: bool) -> None:
    seen = []
    for sampler in samplers(num_rows, 4, shuffle=shuffle, seed=3, drop_last=drop_last):
        rank, replicas = sampler.rank, sampler.num_replicas
        wanted = DistributedSampler(range(num_rows), replicas, rank, shuffle, 3, drop_last)  # type: ignore[arg-type]
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            wanted.set_epoch(epoch)
            assert list(sampler) == list(sampler) == list(wanted)
            assert len(list(sampler)) == len(sampler)
        seen += list(sampler)
    assert len(set(seen)) == (num_rows // 4 * 4 if drop_last else num_rows)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (4, 2), (2, 3)])
def test_resuming_within_an_epoch(before: int, after: int) -> None:
    """What was not drawn is drawn, by other numbers of replicas too, each row once."""
    drawn, states = [], []
    for sampler in samplers(24, before, seed=1):
        sampler.set_epoch(2)
        rows = iter(sampler)
        drawn += [next(rows) for _ in range(3)]
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    left, whole = [], []
    for sampler in samplers(24, after, seed=1):
        sampler.load_state_dict(states[0])
        assert sampler.epoch == 2
        sampler.set_epoch(2)
        left.append(list(sampler))
        sampler.set_epoch(3)
        whole += list(sampler)
    assert len({len(rows) for rows in left}) == 1
    rest = {row for rows in left for row in rows}
    assert set(drawn).isdisjoint(rest) or (24 - len(drawn)) % after  # padded, with the first
    assert set(drawn) | rest == set(range(24))
    assert sorted(whole) == list(range(24))


def test_resuming_between_epochs() -> None:
    [sampler] = samplers(5, 1)
    assert len(list(sampler)) == 5
    at_the_end = sampler.state_dict()
    sampler.set_epoch(1)
    at_the_start = sampler.state_dict()
    second = list(sampler)
    for state, first_lengths in ((at_the_end, [0, 5]), (at_the_start, [5])):
        [other] = samplers(5, 1)
        other.load_state_dict(state)
        epochs = []
        for epoch in range(other.epoch, 2):
            other.set_epoch(epoch)
            epochs.append(list(other))
        assert [len(rows) for rows in epochs] == first_lengths
        assert epochs[-1] == second


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_in_a_loader() -> None:
    sampler, again = samplers(23, 2)[1], samplers(23, 2)[1]
    loader = DataLoader(range(23), batch_size=3, sampler=sampler, drop_last=True)  # type: ignore[arg-type,var-annotated]
    whole = batches(loader)
    assert [len(batch) for batch in whole] == [3, 3, 3, 3]
    rows = iter(loader)
    assert [next(rows).tolist() for _ in range(2)] == whole[:2]
    again.load_state_dict(sampler.state_dict())
    loader = DataLoader(range(23), batch_size=3, sampler=again, drop_last=True)  # type: ignore[arg-type]
    assert batches(loader) == whole[2:]
    assert batches(loader) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader_with_a_state(num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> tuple[DataParallelSampler, Any]:
        sampler = samplers(60, 2)[1]
        return sampler, stateful.StatefulDataLoader(
            range(60), batch_size=3, sampler=sampler, num_workers=num_workers
        )

    sampler, loader = make()
    sampler.set_epoch(4)
    whole = batches(loader)
    rows = iter(loader)
    assert [next(rows).tolist() for _ in range(2)] == whole[:2]
    state = loader.state_dict()
    other, loader = make()
    loader.load_state_dict(state)
    assert batches(loader) == whole[2:]
    assert other.epoch == 4
    assert batches(loader) == whole


def test_what_cannot_be_sampled() -> None:
    with fake_world(1, 4):
        plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
        mesh = build_mesh(ParallelSizes(pp_size=2, dp_size=2), device_type="cpu").world_mesh
        outside = build_mesh(ParallelSizes(pp_size=2), device_type="cpu", ranks=[0, 2]).world_mesh
        for arguments, words in (
            ((range(9), plain), r"no axis 'dp': give dp_axis_names=\('dp_shard',\)"),
            ((range(9), mesh, ("dpp",)), r"dp_axis_names\[0\]='dpp': mesh has the axes"),
            ((range(9), mesh, ("dp", "dp_shard")), "'dp_shard' overlaps another"),
            ((range(9), outside), "this rank is not in mesh"),
            ((range(0), mesh), "dataset has no rows"),
        ):
            with pytest.raises(ValueError, match=words):
                DataParallelSampler(*arguments)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="1 rows for 2 replicas, and drop_last=True leaves"):
            DataParallelSampler(range(1), mesh, drop_last=True)


def test_a_state_of_other_rows_is_refused() -> None:
    [sampler], [other] = samplers(9, 1, seed=1), samplers(8, 1, seed=2, shuffle=False)
    with pytest.raises(ValueError, match="another DataParallelSampler") as refusal:
        other.load_state_dict(sampler.state_dict())
    assert str(refusal.value).splitlines()[1:] == [
        "  rows was 9 and is 8 here",
        "  shuffle was True and is False here",
        "  seed was 1 and is 2 here",
    ]
    assert list(other) == list(range(8))
