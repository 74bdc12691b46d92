import dataclasses
import logging
from typing import Any

import pytest
import torch

from pp_autopipeline import AutoPipeline, PipelineConfig

DEFAULTS: dict[str, Any] = {
    "pp_schedule": "1f1b",
    "pp_schedule_csv": None,
    "pp_microbatch_size": 1,
    "pp_batch_size": 1,
    "layers_per_stage": None,
    "round_virtual_stages_to_pp_multiple": None,
    "module_fqns_per_model_part": None,
    "patch_inner_model": True,
    "patch_causal_lm_model": True,
    "patch_stage_backward_maybe_with_nosync": False,
    "dtype": None,
    "scale_grads_in_schedule": False,
    "loss_fn": None,
    "pp_seq_len": None,
    "pp_recv_buffer_pool": False,
    "pp_recv_buffer_pool_slack": 2,
}


def test_fields_and_defaults_in_their_order() -> None:
    assert list(PipelineConfig().to_dict().items()) == list(DEFAULTS.items())


def test_autopipeline_takes_every_field() -> None:
    taken = {field.name: field.default for field in dataclasses.fields(AutoPipeline)}
    for name, default in DEFAULTS.items():
        if name != "loss_fn":
            assert taken[name] == default


def test_to_dict_and_back() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).sum()

    config = PipelineConfig(
        pp_schedule="zbv", pp_microbatch_size=2, pp_batch_size=8, dtype=torch.bfloat16,
        loss_fn=loss, module_fqns_per_model_part=[["a"], ["b"]],
    )  # fmt: skip
    assert PipelineConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["loss_fn"] is loss
    assert PipelineConfig.from_dict({}) == PipelineConfig()


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_by_name(dtype: Any) -> None:
    assert PipelineConfig.from_dict({"dtype": dtype}).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", ["bf17", "nn", "float"])
def test_a_dtype_that_does_not_exist(dtype: str) -> None:
    if dtype == "float":  # an alias that torch has
        assert PipelineConfig.from_dict({"dtype": dtype}).dtype is torch.float32
    else:
        with pytest.raises(ValueError, match=f"dtype='{dtype}' is no torch dtype"):
            PipelineConfig.from_dict({"dtype": dtype})


def test_unknown_fields_are_named() -> None:
    values = {"pp_shedule": "1f1b", "pp_size": 2, "pp_batch_size": 4}
    with pytest.raises(ValueError, match="no field pp_shedule, pp_size") as caught:
        PipelineConfig.from_dict(values)
    assert "pp_schedule_csv" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pp_schedule": "1f2b"}, ["'1f2b'", "did you mean '1f1b'"]),
        ({"pp_schedule": None}, ["pp_schedule and pp_schedule_csv are both None"]),
        ({"pp_schedule": 1}, ["string"]),
        ({"pp_microbatch_size": 0}, ["pp_microbatch_size=0"]),
        ({"pp_batch_size": -4}, ["pp_batch_size=-4"]),
        ({"pp_batch_size": 2.5}, ["pp_batch_size=2.5"]),
        ({"pp_microbatch_size": 3, "pp_batch_size": 8}, ["use pp_batch_size=6 or 9"]),
        ({"pp_microbatch_size": 3}, ["use pp_batch_size=3"]),
        ({"layers_per_stage": 0}, ["layers_per_stage=0"]),
        ({"layers_per_stage": 2, "module_fqns_per_model_part": [["a"]]}, ["contradicts"]),
        ({"round_virtual_stages_to_pp_multiple": "nearest"}, ["'nearest'", "'up', 'down'"]),
        ({"pp_seq_len": 0}, ["pp_seq_len=0"]),
        ({"pp_recv_buffer_pool_slack": -1}, ["pp_recv_buffer_pool_slack=-1"]),
        ({"pp_recv_buffer_pool_slack": 1.5}, ["pp_recv_buffer_pool_slack=1.5"]),
    ],
)
def test_what_is_wrong_is_said_when_the_config_is_made(
    values: dict[str, Any], words: list[str]
) -> None:
    for make in (lambda: PipelineConfig(**values), lambda: PipelineConfig.from_dict(values)):
        with pytest.raises(ValueError, match="PipelineConfig: ") as caught:
            make()
        assert all(word in str(caught.value) for word in words), caught.value


def test_all_problems_in_one_message() -> None:
    with pytest.raises(ValueError, match="PipelineConfig") as caught:
        PipelineConfig(
            pp_schedule="gpip", pp_microbatch_size=0, layers_per_stage=-1, pp_seq_len=-2,
            round_virtual_stages_to_pp_multiple="x",  # type: ignore[arg-type]
            pp_recv_buffer_pool_slack=-3,
        )  # fmt: skip
    for word in (
        "'gpip'",
        "pp_microbatch_size=0",
        "layers_per_stage=-1",
        "pp_seq_len=-2",
        "'x'",
        "-3",
    ):
        assert word in str(caught.value)


def test_a_schedule_name_beside_a_csv_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        PipelineConfig(pp_schedule_csv="a.csv")
        PipelineConfig(pp_schedule_csv="b.csv", pp_schedule=None)
        assert not caplog.records
        PipelineConfig(pp_schedule_csv="a.csv", pp_schedule="gpipe")
        PipelineConfig(pp_schedule_csv="a.csv", pp_schedule="gpipe")
    [record] = caplog.records
    assert "pp_schedule='gpipe' has no effect" in record.getMessage()
