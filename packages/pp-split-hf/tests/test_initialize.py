from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from pp_split_hf import (
    find_layout,
    init_empty_weights,
    initialize_stage_weights,
    load_stage_weights,
    move_stages,
    plan_stage_fqns,
    split_model_into_stages,
)

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def nan_for_uninitialized() -> Iterator[None]:
    """Memory that nobody gave values holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def initialized(
    tiny: Tiny, family: str, counts: tuple[int, ...], seed: int = 0, on_meta: bool = False
) -> dict[str, torch.Tensor]:
    with torch.device("meta") if on_meta else init_empty_weights():
        model = tiny(family, 3)
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    weights: dict[str, torch.Tensor] = {}
    for part in split_model_into_stages(model, plan, range(len(plan)), layout):
        initialize_stage_weights(part, "cpu", seed=seed)
        weights |= {name: p.detach() for name, p in part.named_parameters()}
        weights |= dict(part.named_buffers())
    return weights


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_the_same_weights_whatever_the_split(family: str, tiny: Tiny) -> None:
    whole = initialized(tiny, family, (3,))
    for counts in ((1, 2), (0, 2, 1), (1, 0, 1, 1)):
        torch.manual_seed(len(counts))  # the process's own stream plays no part
        split = initialized(tiny, family, counts)
        assert split.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(split[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_close_to_the_models_own_beginning(family: str, tiny: Tiny) -> None:
    weights = initialized(tiny, family, (1, 2))
    model = tiny(family, 3)
    assert weights.keys() == dict([*model.named_parameters(), *model.named_buffers()]).keys()
    for name, wanted in model.named_parameters():
        got = weights[name]
        assert got.dtype == wanted.dtype
        if float(wanted.detach().std()) == 0.0:  # ones and zeros
            assert torch.equal(got, wanted.detach()), name
        else:
            assert float(got.mean()) == pytest.approx(float(wanted.detach().mean()), abs=5e-3), name
            assert float(got.std()) == pytest.approx(float(wanted.detach().std()), rel=0.15), name
    for name, wanted in model.named_buffers():
        torch.testing.assert_close(weights[name], wanted)


def test_modules_of_one_kind_get_different_values(tiny: Tiny) -> None:
    weights = initialized(tiny, "llama", (3,))
    first, second = (weights[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, weights["model.layers.0.mlp.gate_proj.weight"])


def test_the_seed_matters(tiny: Tiny) -> None:
    same, other = initialized(tiny, "llama", (3,)), initialized(tiny, "llama", (3,), seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(same[name], other[name])
    assert torch.equal(same["model.norm.weight"], other["model.norm.weight"])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_rotary_tables_that_were_lost_on_meta_come_back(family: str, tiny: Tiny) -> None:
    weights = initialized(tiny, family, (1, 2), on_meta=True)
    for name, buffer in tiny(family, 3).named_buffers():
        torch.testing.assert_close(weights[name], buffer)


def test_it_does_not_disturb_the_processs_random_stream(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 1)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    initialize_stage_weights(model, "cpu")
    assert torch.equal(torch.rand(3), wanted)


def test_dtype_of_parameters_and_buffers(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 2)
    initialize_stage_weights(model, "cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model(torch.arange(6).reshape(1, 6)).logits.isfinite().all()


def test_weights_that_have_values_keep_them(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    initialize_stage_weights(model, "cpu", seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_one_layer_with_values_among_empty_ones(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 2)
    loaded = nn.Parameter(torch.full((48, 32), 3.0))
    model.model.layers[0].mlp.up_proj.weight = loaded
    initialize_stage_weights(model, "cpu")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, loaded)
    assert not any(p.device.type == "meta" for p in model.parameters())
    down = model.model.layers[0].mlp.down_proj.weight
    assert float(down.detach().std()) == pytest.approx(0.02, rel=0.15)


def test_a_tie_inside_a_stage_stays_a_tie(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 2, tie_word_embeddings=True)
    initialize_stage_weights(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.device.type == "cpu"


def test_frozen_parameters_stay_frozen(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 2)
    model.model.embed_tokens.requires_grad_(False)
    initialize_stage_weights(model, "cpu")
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_nothing_is_left_without_a_value(
    family: str, nan_for_uninitialized: None, tiny: Tiny
) -> None:
    assert torch.empty(2).isnan().all()
    for on_meta in (False, True):
        for name, tensor in initialized(tiny, family, (0, 2, 1), on_meta=on_meta).items():
            assert tensor.isfinite().all(), name


def test_a_module_of_which_one_tensor_has_values_is_refused(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("gpt2", 1)
    model.transformer.h[0].attn.c_attn.weight = nn.Parameter(torch.full((32, 96), 3.0))
    with pytest.raises(ValueError, match="other parameters of the same module have") as caught:
        initialize_stage_weights(model, "cpu")
    assert "transformer.h.0.attn.c_attn.bias have no values" in str(caught.value)
    assert model.transformer.h[0].attn.c_attn.bias.device.type == "meta"  # nothing was begun


class WithTable(nn.Module):
    """A module whose table the model's own initialisation does not know."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return hidden_states + self.table.sum()


@pytest.mark.parametrize("table", [torch.arange(4.0), torch.arange(4)])
@pytest.mark.parametrize("read", [False, True])
def test_a_table_that_nobody_fills_is_refused(
    table: torch.Tensor, read: bool, tiny: Tiny, tmp_path: Path
) -> None:
    tiny("llama", 2).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = tiny("llama", 2)
    model.model.layers[1].mlp.add_module("extra", WithTable(table.to("meta")))
    layout = find_layout(model)
    [part] = split_model_into_stages(model, plan_stage_fqns(layout, [1, 1]), [1], layout)
    fill = partial(load_stage_weights, checkpoint=tmp_path) if read else initialize_stage_weights
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.extra\.table is on the meta device"):
        fill(part, device="cpu")


def test_what_an_architecture_keeps_in_float32(tiny: Tiny) -> None:
    class Keeper(LlamaForCausalLM):
        _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"o_proj"}

    def make() -> PreTrainedModel:
        return Keeper(tiny("llama", 2).config)

    with init_empty_weights():
        model = make()
    layout = find_layout(model, torch.bfloat16)
    [part] = split_model_into_stages(model, plan_stage_fqns(layout, [1, 1]), [1], layout)
    for _ in range(2):  # with the dtype they are made in, and once more
        initialize_stage_weights(part, "cpu", torch.bfloat16)
        dtypes = {name: p.dtype for name, p in part.named_parameters()}
        assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == {
            "model.layers.1.self_attn.o_proj.weight"
        }
    moved = split_model_into_stages(make(), plan_stage_fqns(layout, [1, 1]), [1], layout)
    move_stages(moved, "cpu", torch.bfloat16)
    assert {name: p.dtype for name, p in moved[0].named_parameters()} == dtypes
