from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from pp_autopipeline.devices import resolve_device


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_on_the_cpu(device: Any, mesh: DeviceMesh) -> None:
    assert resolve_device(device, mesh) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (0, ["device=0", "accelerator", "CPU"]),
        ("cuda:1", ["'cuda:1'", "'cpu'"]),
        (torch.device("cuda"), ["'cuda'", "'cpu'"]),
        ("meta", ["'meta'", "'cpu'"]),
    ],
)
def test_a_device_that_the_mesh_is_not_on(device: Any, words: list[str], mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="world_mesh") as caught:
        resolve_device(device, mesh)
    assert all(word in str(caught.value) for word in words)


def test_a_device_that_does_not_exist(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match="quartz"):
        resolve_device("quartz", mesh)
