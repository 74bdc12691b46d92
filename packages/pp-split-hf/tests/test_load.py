"""What a stage reads from a checkpoint is what `from_pretrained` gives a whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    PreTrainedModel,
)

from pp_split_hf import (
    CheckpointError,
    CheckpointWeights,
    find_layout,
    init_empty_weights,
    initialize_stage_weights,
    load_stage_weights,
    plan_stage_fqns,
    split_model_into_stages,
    stage_part,
)
from pp_split_hf.safetensors_files import MappedFiles, StoredTensor

Tiny = Callable[..., PreTrainedModel]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def stages(model: nn.Module, counts: tuple[int, ...] = (1, 2)) -> list[nn.Module]:
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(model, plan, range(len(plan)), layout)


def empty_stages(make: Callable[[], nn.Module], counts: tuple[int, ...] = (1, 2)) -> list[Any]:
    with init_empty_weights():
        return stages(make(), counts)


def check(parts: list[nn.Module], whole: nn.Module) -> None:
    """The stages together are the whole model, bit for bit, tables that are not stored too."""
    wanted = dict([*whole.state_dict().items(), *whole.named_buffers()])
    seen = set()
    for part in parts:
        for name, tensor in [*part.state_dict().items(), *part.named_buffers()]:
            if name in wanted:  # zeros in the place of another stage's parameter are not
                assert tensor.dtype == wanted[name].dtype, name
                assert torch.equal(tensor, wanted[name]), name
                seen.add(name)
    assert seen == set(wanted)


@pytest.mark.parametrize("context", [init_empty_weights, lambda: torch.device("meta")])
@pytest.mark.parametrize("size", ["50GB", "20KB"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_one_file_or_many(
    family: str, size: str, context: Callable[[], Any], tiny: Tiny, tmp_path: Path
) -> None:
    settings = EXPERTS if family == "qwen3_moe" else {}
    whole = tiny(family, 3, **settings)
    whole.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors").exists() == (size == "50GB")
    with context():
        parts = stages(tiny(family, 3, **settings))
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu")
    check(parts, whole)


def test_a_file_by_its_path(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny("llama", 3)
    whole.save_pretrained(tmp_path)
    parts = empty_stages(lambda: tiny("llama", 3))
    for part in parts:
        load_stage_weights(part, str(tmp_path / "model.safetensors"), torch.device("cpu"))
    check(parts, whole)


def test_an_index_that_an_earlier_save_left(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama", 3, initializer_range=0.5).save_pretrained(tmp_path, max_shard_size="20KB")
    whole = tiny("llama", 3)
    whole.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    parts = empty_stages(lambda: tiny("llama", 3))
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu")
    check(parts, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(dtype: torch.dtype, tiny: Tiny, tmp_path: Path) -> None:
    tiny("qwen3_moe", 3, **EXPERTS).save_pretrained(tmp_path)
    wanted = type(tiny("qwen3_moe", 1)).from_pretrained(tmp_path, dtype=dtype)
    parts = empty_stages(lambda: tiny("qwen3_moe", 3, **EXPERTS))
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu", dtype)
    check(parts, wanted)


def float32_keeper() -> PreTrainedModel:
    """Its attention sinks, among others, are float32 whatever the dtype of the model."""
    torch.manual_seed(3)
    config = DeepseekV4Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        q_lora_rank=16, o_lora_rank=8, o_groups=2, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, max_position_embeddings=64, index_n_heads=2, index_head_dim=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_architecture_keeps_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    float32_keeper().save_pretrained(tmp_path)
    wanted = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in wanted.parameters()} == {dtype, torch.float32}
    parts = empty_stages(float32_keeper)
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu", dtype)
    parameters = dict(wanted.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.dtype == parameters[name].dtype, name
            assert torch.equal(parameter, parameters[name]), name


def test_parameters_with_values_are_filled_where_they_are(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny("gpt2", 3, initializer_range=0.5)
    whole.save_pretrained(tmp_path)
    parts = stages(tiny("gpt2", 3))
    parts[0].get_parameter("transformer.wpe.weight").requires_grad_(False)
    before = {name: p for part in parts for name, p in part.named_parameters()}
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu")
    check(parts, whole)
    assert all(before[name] is p for part in parts for name, p in part.named_parameters())
    assert not parts[0].get_parameter("transformer.wpe.weight").requires_grad


def test_the_model_that_was_cut_is_not_changed(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama", 3).save_pretrained(tmp_path)
    with init_empty_weights():
        model = tiny("llama", 3)
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    frozen.mark = "kept"  # type: ignore[attr-defined]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    parts = stages(model)
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu", torch.bfloat16)
    assert all(p.device.type == "meta" and p.dtype == torch.float32 for p in model.parameters())
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    embedding = parts[0].get_parameter("model.embed_tokens.weight")
    assert not embedding.requires_grad
    assert embedding.mark == "kept"  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.wte.weight", "both"])
def test_a_tied_weight_under_any_of_its_names(
    name: str, by_hand: bool, tiny: Tiny, tmp_path: Path
) -> None:
    def make() -> PreTrainedModel:
        model = tiny("gpt2", 3, tie_word_embeddings=not by_hand)
        model.lm_head.weight = model.transformer.wte.weight
        return model

    tensors = {n: t.clone() for n, t in make().state_dict().items()}
    if name != "both":
        del tensors[({"lm_head.weight", "transformer.wte.weight"} - {name}).pop()]
    save_file(tensors, tmp_path / "model.safetensors")
    parts = empty_stages(make, (1, 1, 1))
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu")
    check(parts, make())
    [alone] = empty_stages(make, (3,))
    load_stage_weights(alone, tmp_path, "cpu")
    assert alone.lm_head.weight is alone.transformer.wte.weight
    if name == "both":
        save_file(
            {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(CheckpointError, match="with different values") as caught:
            load_stage_weights(parts[0], tmp_path, "cpu")
        assert "tie_word_embeddings=False" in str(caught.value)


def test_a_new_head(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny("llama", 3)
    whole.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=5)
    parts = empty_stages(lambda: AutoModelForSequenceClassification.from_config(config))
    with pytest.raises(CheckpointError) as caught:
        load_stage_weights(parts[1], tmp_path, "cpu")
    assert "lacks 1 tensor: score.weight (if that is meant to be so, pass allow_missing=True)" in (
        str(caught.value)
    )
    assert "the model has not, 1 tensor: lm_head.weight" in str(caught.value)
    assert "allow_unexpected=True" in str(caught.value)
    for part in parts:
        load_stage_weights(part, tmp_path, "cpu", allow_missing=True, allow_unexpected=True)
    assert parts[1].get_parameter("score.weight").device.type == "meta"
    for part in parts:
        initialize_stage_weights(part, "cpu")
    assert parts[1].get_parameter("score.weight").any()
    for name, parameter in whole.model.named_parameters(prefix="model"):
        assert any(
            torch.equal(parameter, part.state_dict()[name])
            for part in parts
            if name in part.state_dict()
        )


def test_a_checkpoint_of_the_decoder_alone_and_the_other_way(tiny: Tiny, tmp_path: Path) -> None:
    bare, whole = tiny("llama", 3, bare=True), tiny("llama", 3)
    bare.save_pretrained(tmp_path / "bare")
    whole.save_pretrained(tmp_path / "whole")
    parts = empty_stages(lambda: tiny("llama", 3))
    for part in parts:
        load_stage_weights(part, tmp_path / "bare", "cpu", allow_missing=True)
    head = parts[1].get_parameter("lm_head.weight")
    assert head.device.type == "meta"
    parts[1].lm_head.weight = whole.lm_head.weight
    bare_in_whole = tiny("llama", 3)
    bare_in_whole.model.load_state_dict(bare.state_dict())
    bare_in_whole.lm_head.weight = whole.lm_head.weight
    check(parts, bare_in_whole)
    parts = empty_stages(lambda: tiny("llama", 3, bare=True))
    for part in parts:
        load_stage_weights(part, tmp_path / "whole", "cpu", allow_unexpected=True)
    check(parts, whole.model)


def test_progress(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny("qwen3_moe", 3, **EXPERTS)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    totals = []
    for part in empty_stages(lambda: tiny("qwen3_moe", 3, **EXPERTS)):
        calls: list[tuple[int, int]] = []
        load_stage_weights(
            part, tmp_path, "cpu", progress=lambda *call, calls=calls: calls.append(call)
        )
        assert calls == sorted(calls)
        assert calls[0] == (0, calls[-1][0])
        assert {total for _, total in calls} == {calls[-1][0]}
        totals.append(calls[-1][0])
    assert sum(totals) == sum(p.nbytes for p in whole.parameters())


class Witness(MappedFiles):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[StoredTensor] = []

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        self.asked.append(stored)
        return super().tensor(stored)


def test_tensors_of_other_stages_are_not_read(tiny: Tiny, tmp_path: Path) -> None:
    tiny("qwen3_moe", 3, **EXPERTS).save_pretrained(tmp_path)
    for part in empty_stages(lambda: tiny("qwen3_moe", 3, **EXPERTS), (1, 0, 2)):
        of_stage = stage_part(part)
        assert of_stage is not None
        weights = CheckpointWeights(of_stage.skeleton, tmp_path)
        assert weights.problems([part]) == []
        weights._files = witness = Witness()
        weights.load([part], "cpu")
        asked = {stored.begin for stored in witness.asked}
        assert len(asked) == len(witness.asked)  # each once
        own = {0: ("model.embed", "model.layers.0."), 1: ("none",), 2: ("lm_head", "model.norm.")}
        own[2] += ("model.layers.1.", "model.layers.2.")
        prefixes = own[of_stage.stage_index]
        assert asked == {s.begin for n, s in weights.stored.items() if n.startswith(prefixes)}


class Odd(nn.Module):
    """A module of the kinds of tensors that decoder layers seldom have."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("table", torch.arange(4.0, dtype=torch.float64))
        self.register_buffer("unsaved", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_tensors_of_every_kind(padding: int, tiny: Tiny, tmp_path: Path) -> None:
    def make() -> PreTrainedModel:
        model = tiny("llama", 3)
        model.model.layers[1].odd = Odd()
        return model

    file, whole = tmp_path / "model.safetensors", make()
    save_file({n: t.contiguous() for n, t in whole.state_dict().items()}, file)
    # The header may have any length: tensors need not be aligned.
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    for fill in (torch.zeros_like, torch.ones_like):
        with init_empty_weights():
            model = make()
        odd = model.model.layers[1].odd
        for name in ("count", "mask", "bytes", "table"):
            setattr(odd, name, fill(getattr(odd, name)))
        parts = stages(model)
        for part in parts:
            load_stage_weights(part, tmp_path, "cpu", torch.float32)
        check(parts, whole)
    real = stages(make())
    for part in real:
        for parameter in part.parameters():
            parameter.data.zero_()
        load_stage_weights(part, tmp_path, "cpu")
    check(real, whole)
    assert not real[1].get_parameter("model.layers.1.odd.transposed").is_contiguous()
    assert load_file(file).keys() == whole.state_dict().keys()
