"""Reading a checkpoint into a pipeline of one rank; several are in the integration tests."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from pp_autopipeline import AutoPipeline, init_empty_weights
from pp_split_hf import CheckpointError

Llama = Callable[..., PreTrainedModel]


def test_the_dtype_of_the_pipeline(mesh: DeviceMesh, llama: Llama, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = llama()
    ap = AutoPipeline(mesh, dtype=torch.bfloat16).build(empty).load_pretrained(tmp_path)
    wanted = model.to(torch.bfloat16).state_dict()
    for part in ap.parts:
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name
    ap.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype="auto")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_a_new_head(
    mesh: DeviceMesh, llama: Llama, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=5)
    with init_empty_weights():
        model = AutoModelForSequenceClassification.from_config(config)
    assert model.name_or_path  # of which materialize warns that it is not read
    ap = AutoPipeline(mesh).build(model)
    with pytest.raises(CheckpointError, match=r"score\.weight") as caught:
        ap.load_pretrained(tmp_path)
    assert str(caught.value).startswith(f"cannot load {tmp_path}:\n  {tmp_path} lacks 1 tensor")
    with caplog.at_level(logging.WARNING, "pp_autopipeline"):
        ap.load_pretrained(tmp_path, allow_missing=True, allow_unexpected=True).materialize()
    assert not caplog.records
    assert all(p.device.type == "cpu" for p in ap.parameters())
    assert ap.parts[0].get_parameter("score.weight").any()


def test_before_it_is_built(mesh: DeviceMesh, tmp_path: Path) -> None:
    for call in (AutoPipeline(mesh).load_pretrained, AutoPipeline(mesh).save_pretrained):
        with pytest.raises(RuntimeError, match=r"call build\(model"):
            call(tmp_path)
