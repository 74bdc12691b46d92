"""Configs of what is done to a stage: their fields, what they refuse, and what has no effect."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pp_autopipeline import AutoPipeline, ParallelSizes, PipelineConfig
from pp_autopipeline.parallelize import (
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
    parallelize_fn,
)
from pp_autopipeline.parallelize.config import STRATEGIES


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """Eight ranks of which only the first exists."""
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny(**overrides: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2,
        **{"num_key_value_heads": 2, **overrides},
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def build(setup: DistributedSetup, model: nn.Module | None = None) -> AutoPipeline:
    ap = AutoPipeline(**setup.pipeline_axes, pp_batch_size=4, loss_reduction="mean")
    return ap.build(
        model or tiny(), loss_fn=lambda x, y: x.sum(), parallelize_fn=setup.parallelize_fn
    )


# --- configs


def test_the_defaults_are_those_of_nemo_automodel() -> None:
    fsdp2 = FSDP2Config()
    policy = fsdp2.mp_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False)
    rest = {k: v for k, v in fsdp2.to_dict().items() if k not in ("mp_policy", "multimodal")}
    assert rest == {
        "sequence_parallel": False, "tp_plan": None, "patch_is_packed_sequence": False,
        "offload_policy": None, "autocast_dtype": None, "activation_checkpointing": False,
        "activation_checkpointing_scope": "all", "defer_fsdp_grad_sync": True,
        "reshard_after_forward": None, "enable_async_tensor_parallel": False,
        "enable_compile": False, "enable_fsdp2_prefetch": False,
        "fsdp2_backward_prefetch_depth": 2, "fsdp2_forward_prefetch_depth": 1,
    }  # fmt: skip
    assert fsdp2.multimodal == MultimodalDistributedConfig("root", MultimodalVisionConfig(False))
    assert DDPConfig().to_dict() == {
        "activation_checkpointing": False, "activation_checkpointing_scope": "all",
        "broadcast_buffers": False, "find_unused_parameters": False, "static_graph": False,
        "bucket_cap_mb": None, "gradient_as_bucket_view": False, "autocast_dtype": None,
    }  # fmt: skip
    assert MegatronFSDPConfig().to_dict() == {
        "megatron_fsdp_unit_modules": None, "zero_dp_strategy": 3,
        "init_fsdp_with_meta_device": False, "grad_reduce_in_fp32": False,
        "preserve_fp32_weights": False, "overlap_grad_reduce": True, "overlap_param_gather": True,
        "check_for_nan_in_grad": True, "report_nan_in_param_grad": False,
        "average_in_collective": False, "disable_bucketing": False,
        "calculate_per_token_loss": False, "keep_fp8_transpose_cache": False, "nccl_ub": False,
        "fsdp_double_buffer": False, "activation_checkpointing": False,
    }  # fmt: skip
    assert MoEParallelizerConfig().to_dict() == {
        "ignore_router_for_ac": True, "reshard_after_forward": False, "mp_policy": None,
    }  # fmt: skip
    for config in (fsdp2, DDPConfig(), MegatronFSDPConfig()):
        assert type(config)(**config.to_dict()) == config


def test_dtypes_may_be_named() -> None:
    assert FSDP2Config(autocast_dtype="bfloat16").autocast_dtype is torch.bfloat16
    assert DDPConfig(autocast_dtype="torch.float16").autocast_dtype is torch.float16
    assert FSDP2Config(mp_policy=None) == FSDP2Config()


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (FSDP2Config, {"activation_checkpointing": "all"}, "activation_checkpointing='all' is none of False, True, 'full', 'selective'"),
        (FSDP2Config, {"activation_checkpointing": 1}, "activation_checkpointing=1 is none of"),
        (FSDP2Config, {"activation_checkpointing_scope": ["language", "audio"]}, "scope='audio' is none of 'all', 'language'"),
        (FSDP2Config, {"autocast_dtype": "bf16"}, "autocast_dtype='bf16' is no dtype"),
        (FSDP2Config, {"fsdp2_forward_prefetch_depth": 0}, "fsdp2_forward_prefetch_depth=0 must be an integer of at least 1"),
        (FSDP2Config, {"fsdp2_backward_prefetch_depth": True}, "fsdp2_backward_prefetch_depth=True must be"),
        (FSDP2Config, {"tp_plan": "auto"}, "tp_plan='auto' must be a dict"),
        (DDPConfig, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be more than 0"),
        (DDPConfig, {"autocast_dtype": 16}, "autocast_dtype=16 is no dtype"),
        (MegatronFSDPConfig, {"zero_dp_strategy": 4}, "zero_dp_strategy=4 is none of 0, 1, 2, 3"),
        (MultimodalDistributedConfig, {"frozen_sharding": "none"}, "frozen_sharding='none' is none of 'root'"),
        (MultimodalVisionConfig, {"frame_sharding": True}, "frame_sharding is not offered here"),
    ],
)  # fmt: skip
def test_what_a_config_refuses(config: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="makes no sense") as error:
        config(**settings)
    assert words in str(error.value)


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(ValueError, match="FSDP2Config makes no sense") as error:
        FSDP2Config(
            activation_checkpointing="x", autocast_dtype="y", fsdp2_forward_prefetch_depth=-1
        )  # type: ignore[arg-type]
    assert len(str(error.value).splitlines()) == 4


# --- setups


def test_what_a_setup_says_of_its_meshes(fake_ranks: None) -> None:
    sizes = ParallelSizes(pp_size=2, dp_replicate_size=2, cp_size=2, ep_size=2)
    setup = DistributedSetup.build("fsdp2", sizes, {"pp_batch_size": 4}, device_type="cpu")
    assert isinstance(setup.pipeline_config, PipelineConfig)
    assert (setup.pp_size, setup.tp_size, setup.cp_size, setup.ep_size) == (2, 1, 2, 2)
    assert (setup.dp_size, setup.dp_replicate_size, setup.dp_shard_size) == (2, 2, 1)
    assert setup.pp_enabled
    axes = setup.pipeline_axes
    assert axes["dp_axis_names"] == ("dp_replicate", "dp_shard")
    assert (axes["cp_axis_name"], axes["tp_axis_name"], axes["ep_axis_name"]) == ("cp", None, "ep")


def test_a_setup_of_a_mesh_of_ones_own(fake_ranks: None) -> None:
    setup = DistributedSetup(init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp")))
    assert (setup.pp_size, setup.dp_size, setup.tp_size, setup.ep_size) == (2, 4, 1, 1)
    assert setup.dp_replicate_size is None
    assert setup.pipeline_axes["dp_axis_names"] == ("dp",)
    assert isinstance(setup.strategy_config, FSDP2Config)


def test_checkpointing_in_effect(fake_ranks: None) -> None:
    config = FSDP2Config(activation_checkpointing="selective")
    assert DistributedSetup.build(config, device_type="cpu").activation_checkpointing == "selective"
    other = DistributedSetup.build(config, device_type="cpu", activation_checkpointing="full")
    assert other.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("strategy", "sizes", "others", "words"),
    [
        ("fsdp", {}, {}, ["strategy='fsdp' is none of 'fsdp2', 'ddp', 'megatron_fsdp'; did you mean 'fsdp2'?"]),
        ("ddp", {"pp_size": 2}, {}, ["DDPConfig does not go with a pipeline: pp_size is 2"]),
        ("megatron_fsdp", {"pp_size": 2}, {}, ["MegatronFSDPConfig does not go with a pipeline", "CUDA"]),
        ("ddp", {"tp_size": 2, "cp_size": 2}, {}, ["tp_size=2: use FSDP2Config", "cp_size=2: use FSDP2Config"]),
        ("fsdp2", {"cp_size": 4}, {"cp_ring_degree": 3}, ["cp_ring_degree=3, cp_ulysses_degree=None do not make cp_size=4"]),
        ("fsdp2", {"cp_size": 4}, {"cp_ring_degree": 2, "cp_ulysses_degree": 4}, ["do not make cp_size=4"]),
        ("fsdp2", {}, {"cp_ulysses_degree": 0}, ["both must be at least 1"]),
        ("fsdp2", {"pp_size": 3}, {}, ["does not divide the world size 8"]),
    ],
)  # fmt: skip
def test_what_a_setup_refuses(
    fake_ranks: None, strategy: str, sizes: dict[str, int], others: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        DistributedSetup.build(strategy, ParallelSizes(**sizes), device_type="cpu", **others)
    assert all(word in str(error.value) for word in words)


def test_every_strategy_has_a_name() -> None:
    assert set(STRATEGIES.values()) == {FSDP2Config, DDPConfig, MegatronFSDPConfig}


# --- what a stage cannot be


@pytest.mark.parametrize(
    ("sizes", "config", "overrides", "words"),
    [
        ({"tp_size": 8}, {}, {}, ["num_attention_heads=4 is not a multiple of tp_size=8", "num_key_value_heads=2"]),
        ({"tp_size": 2}, {"tp_plan": {"model.layers.*.mlp.up_proj": "columns"}}, {}, ["tp_plan['model.layers.*.mlp.up_proj']='columns' is none of", "colwise"]),
        ({"dp_size": 4, "ep_size": 2}, {}, {}, ["LlamaForCausalLM has no expert-parallel plan"]),
        ({"cp_size": 4}, {}, {}, ["num_key_value_heads=2 is not a multiple of cp_size=4"]),
        ({"cp_size": 2, "tp_size": 2}, {}, {}, ["num_key_value_heads=2 is not a multiple of cp_size=2 x tp_size=2"]),
        ({"cp_size": 2, "tp_size": 2}, {"sequence_parallel": True}, {}, ["both share the sequence"]),
        ({"tp_size": 4, "ep_size": 2}, {}, {"num_key_value_heads": 4}, ["ep_size=2 covers 2 of the tp_size=4"]),
        ({"dp_size": 2, "ep_size": 2}, {"activation_checkpointing": "selective"}, {}, ["'selective' does not go with ep_size=2"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_model(
    sizes: dict[str, int], config: dict[str, Any], overrides: dict[str, Any], words: list[str]
) -> None:
    world_size = 1
    for axis in ("tp_size", "cp_size", "dp_size"):
        world_size *= sizes.get(axis, 1)
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        strategy = FSDP2Config(**config)

        def make() -> None:
            build(
                DistributedSetup.build(strategy, ParallelSizes(**sizes), device_type="cpu"), model
            )

        model = tiny(**overrides)
        with pytest.raises(ValueError, match=r"impossible|covers") as error:
            make()
        assert all(word in str(error.value) for word in words)
    finally:
        dist.destroy_process_group()


def test_a_callback_refuses_what_a_setup_does(fake_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    ap = AutoPipeline(mesh, pp_batch_size=4, loss_reduction="mean")
    with pytest.raises(ValueError, match="DDPConfig does not go with a pipeline: pp_size is 2"):
        ap.build(tiny(), loss_fn=lambda x, y: x.sum(), parallelize_fn=parallelize_fn(DDPConfig()))


def test_ring_attention_is_refused(fake_ranks: None) -> None:
    sizes = ParallelSizes(cp_size=2)
    setup = DistributedSetup.build("fsdp2", sizes, device_type="cpu", cp_ring_degree=2)
    with pytest.raises(ValueError, match=r"cp_ring_degree=2: torch's ring attention"):
        build(setup)


# --- what is done to a stage


@pytest.mark.parametrize("mode", [True, "full", "selective"])
def test_layers_are_checkpointed(alone: None, mode: Any) -> None:
    setup = DistributedSetup.build(FSDP2Config(activation_checkpointing=mode), device_type="cpu")
    (part,) = build(setup).parts
    layers = [m for m in part.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]
    assert list(part.state_dict()) == list(tiny().state_dict()), "no name changes"


@pytest.mark.parametrize(("scope", "frozen", "found"), [
    ("language", (), 2), ("vision", (), 0), (["vision", "language"], (), 2),
    ("language", ("model.layers.0",), 1), ("all", ("model.layers.0",), 2),
])  # fmt: skip
def test_the_scope_of_checkpointing(
    alone: None, scope: Any, frozen: tuple[str, ...], found: int
) -> None:
    model = tiny()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    config = FSDP2Config(activation_checkpointing=True, activation_checkpointing_scope=scope)
    (part,) = build(DistributedSetup.build(config, device_type="cpu"), model).parts
    layers = [m for m in part.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert sum(layer.gradient_checkpointing for layer in layers) == found


def test_trainability_is_applied_again(alone: None) -> None:
    def freeze(part: nn.Module) -> None:
        part.get_submodule("model.embed_tokens").requires_grad_(False)

    setup = DistributedSetup.build("fsdp2", device_type="cpu", reapply_trainability=freeze)
    (part,) = build(setup).parts
    assert not part.get_parameter("model.embed_tokens.weight").requires_grad


def test_the_forward_runs_under_autocast(alone: None) -> None:
    config = FSDP2Config(autocast_dtype="bfloat16")
    setup = DistributedSetup.build(config, device_type="cpu")
    ap = build(setup, tiny().float())
    seen: list[torch.dtype] = []
    head = ap.parts[0].get_submodule("lm_head")
    head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    ids = torch.zeros(4, 3, dtype=torch.long)
    ap.eval(ids, target=ids)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_parallel": True}, "sequence_parallel has no effect: there is no tensor-parallel"),
        ({"tp_plan": {"lm_head": "colwise_rep"}}, "tp_plan has no effect"),
        ({"fsdp2_forward_prefetch_depth": 3}, "fsdp2_forward_prefetch_depth has no effect: enable_fsdp2_prefetch"),
        ({"moe": MoEParallelizerConfig(reshard_after_forward=True)}, "moe_parallel_config has no effect: there is no expert-parallel"),
        ({"activation_checkpointing": True, "activation_checkpointing_scope": "vision"}, "finds no layer"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_told_of_once(
    alone: None, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str
) -> None:
    from pp_autopipeline import checks

    checks._warned.clear()
    settings = dict(settings)
    moe = settings.pop("moe", None)
    config = FSDP2Config(**settings)
    setup = DistributedSetup.build(config, device_type="cpu", moe_parallel_config=moe)
    with caplog.at_level(logging.WARNING):
        build(setup)
        build(setup)
    assert len([record for record in caplog.records if words in record.getMessage()]) == 1


def test_async_tensor_parallel_is_for_gpus(caplog: pytest.LogCaptureFixture) -> None:
    from pp_autopipeline import checks

    checks._warned.clear()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        config = FSDP2Config(enable_async_tensor_parallel=True)
        setup = DistributedSetup.build(config, ParallelSizes(tp_size=2), device_type="cpu")
        with caplog.at_level(logging.WARNING):
            build(setup)
    finally:
        dist.destroy_process_group()
    messages = [record.getMessage() for record in caplog.records]
    assert any("sets sequence_parallel=True too" in message for message in messages)
    assert any("it is for CUDA devices" in message for message in messages)


def test_no_batch_is_taken_for_packed(alone: None) -> None:
    from transformers import modeling_flash_attention_utils as attention

    before = attention._is_packed_sequence
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    assert before(packed, 1)
    try:
        config = FSDP2Config(patch_is_packed_sequence=True)
        build(DistributedSetup.build(config, device_type="cpu"))
        assert not attention._is_packed_sequence(packed, 1)
    finally:
        attention._is_packed_sequence = before


def test_a_mesh_without_data_parallel_ranks_shards_nothing(alone: None) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    (part,) = build(DistributedSetup(mesh)).parts
    assert all(type(parameter) is nn.Parameter for parameter in part.parameters())
