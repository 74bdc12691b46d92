from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pp_mesh import ParallelSizes, build_mesh, destroy_distributed, initialize_distributed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    yield
    destroy_distributed()


def test_one_rank_without_torchrun() -> None:
    info = initialize_distributed()
    assert (info.backend, info.rank, info.world_size, info.is_main) == ("gloo", 0, 1, True)
    assert info.device == torch.device("cpu")
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1]
    assert initialize_distributed() == info
    destroy_distributed()
    assert not dist.is_initialized()
    destroy_distributed()
    assert initialize_distributed() == info


def test_the_timeout_reaches_every_group() -> None:
    initialize_distributed(timeout_minutes=7)

    def timeouts(minutes: float | None) -> set[timedelta]:
        mesh, _ = build_mesh(ParallelSizes(cp_ring_size=1), timeout_minutes=minutes)
        names = [*(mesh.mesh_dim_names or ()), "cp", "dp", "dp_cp", "dp_shard_cp"]
        cpu = torch.device("cpu")
        return {mesh[name].get_group()._get_backend(cpu).options._timeout for name in names}

    assert timeouts(None) == {timedelta(minutes=7)}
    assert timeouts(0.5) == {timedelta(seconds=30)}


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RuntimeError, match="but WORLD_SIZE, LOCAL_RANK, MASTER_PORT missing"):
        initialize_distributed()


def test_an_address_alone_is_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert initialize_distributed().world_size == 1


@pytest.mark.parametrize(
    ("rank", "message"), [("x", "RANK='x'"), ("2", "RANK=2 .* less than WORLD_SIZE=2")]
)
def test_variables_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, rank: str, message: str
) -> None:
    for name, value in zip(VARIABLES, (rank, "2", "0", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        initialize_distributed()


def test_a_group_that_was_made_without_naming_a_backend() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    info = initialize_distributed()
    assert "cpu:gloo" in info.backend
    assert initialize_distributed(info.backend) == info
    world_mesh = build_mesh(ParallelSizes(), timeout_minutes=3).world_mesh
    backend = world_mesh.get_group("pp")._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(minutes=3)


def test_arguments_that_make_no_sense() -> None:
    for never in (0, float("inf"), "5"):
        with pytest.raises(ValueError, match=f"timeout_minutes={never!r} must be a number"):
            initialize_distributed(timeout_minutes=never)
    with pytest.raises(ValueError, match="needs 1 CUDA devices, but 0 can be seen"):
        initialize_distributed("nccl")
    initialize_distributed("gloo")
    with pytest.raises(RuntimeError, match=r"'nccl' was asked for, .* 'gloo' already"):
        initialize_distributed("nccl")
