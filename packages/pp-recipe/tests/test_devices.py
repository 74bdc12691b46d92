import pytest
import torch

from pp_recipe import OptionsError, TrainOptions
from pp_recipe.devices import settle_device


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def gpus(monkeypatch):
    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("count", "device", "wanted", "settled"),
    [
        (0, None, None, ("cpu", 2)),
        (0, "cpu", 4, ("cpu", 4)),
        (1, None, None, ("cuda", 1)),
        (8, None, None, ("cuda", 2)),
        (8, "cuda", 8, ("cuda", 8)),
        (1, "cpu", None, ("cpu", 2)),
    ],
)
def test_device_and_ranks_follow_the_machine(gpus, count, device, wanted, settled):
    gpus(count)
    options = settle_device(TrainOptions(device=device, nproc_per_node=wanted))
    assert (options.device, options.nproc_per_node) == settled


@pytest.mark.parametrize(
    ("count", "device", "wanted", "part"),
    [
        (0, "cuda", None, "--device cuda: torch finds no GPU"),
        (2, "cuda", 4, "--nproc-per-node 4 needs 4 GPUs, and this machine has 2"),
        (1, None, 2, "--nproc-per-node 2 needs 2 GPUs, and this machine has 1"),
    ],
)
def test_too_few_gpus_are_an_error(gpus, count, device, wanted, part):
    gpus(count)
    with pytest.raises(OptionsError, match=part):
        settle_device(TrainOptions(device=device, nproc_per_node=wanted))
