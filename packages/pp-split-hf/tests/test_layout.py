from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

from pp_split_hf import find_layout, init_empty_weights

Tiny = Callable[..., PreTrainedModel]


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, num_hidden_layers: int = 3, **kwargs: object) -> None:
        self.num_hidden_layers = num_hidden_layers
        self.vocab_size = 20
        super().__init__(**kwargs)


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])  # as long as the model

    def forward(self, *, states: torch.Tensor, flag: bool) -> tuple[torch.Tensor, None]:
        states = states + self.mix(states)
        for branch in self.branches:
            states = states + branch(states)
        return states, None


class Odd(PreTrainedModel):
    """Nothing is called what it is called elsewhere, and there are two lists of the same length."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(20, 4)
        self.widen = nn.Linear(4, 6)
        self.scales = nn.ModuleList(
            [nn.LayerNorm(6, bias=False) for _ in range(config.num_hidden_layers)]
        )
        self.tower = nn.Module()
        self.tower.floor = nn.ModuleList([OddBlock() for _ in range(config.num_hidden_layers)])
        self.tower.calm = nn.Dropout(0.0)
        self.tower.last = nn.LayerNorm(6)
        self.tower.unused = nn.Linear(2, 2)
        self.out = nn.Linear(6, 20)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = self.tower.calm(self.widen(self.words(input_ids)))
        for block in self.tower.floor:
            states = block(states=states, flag=True)[0]
        return self.out(self.tower.last(states))


def test_llama(tiny: Tiny) -> None:
    layout = find_layout(tiny("llama", 3))
    assert layout.layers == "model.layers"
    assert layout.num_layers == 3
    assert layout.layer_fqns == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert layout.embeddings == layout.first_stage == ("model.embed_tokens",)
    assert layout.norms == ("model.norm",)
    assert layout.heads == ("lm_head",)
    assert layout.last_stage == ("model.norm", "lm_head")
    assert layout.shared == ("model.rotary_emb",)
    assert layout.multimodal_encoders == ()
    assert layout.unplaceable == ()
    assert not any(isinstance(layout.trace.outputs[fqn], tuple) for fqn in layout.layer_fqns)


def test_gpt2(tiny: Tiny) -> None:
    layout = find_layout(tiny("gpt2", 2))
    assert layout.layers == "transformer.h"
    assert set(layout.embeddings) == {"transformer.wte", "transformer.wpe"}
    assert layout.norms == ("transformer.ln_f",)
    assert layout.heads == ("lm_head",)
    assert layout.shared == ("transformer.drop",)


def test_gemma2(tiny: Tiny) -> None:
    layout = find_layout(tiny("gemma2", 4))
    assert layout.layers == "model.layers"
    assert layout.first_stage == ("model.embed_tokens",)
    assert layout.last_stage == ("model.norm", "lm_head")


def test_a_bare_decoder(tiny: Tiny) -> None:
    layout = find_layout(tiny("llama", 2, bare=True))
    assert layout.layers == "layers"
    assert layout.layer_fqns == ("layers.0", "layers.1")
    assert layout.first_stage == ("embed_tokens",)
    assert layout.last_stage == ("norm",)
    assert layout.heads == ()
    assert layout.shared == ("rotary_emb",)


def test_a_model_of_ones_own() -> None:
    layout = find_layout(Odd(OddConfig()))
    assert layout.layers == "tower.floor"
    assert layout.embeddings == ("words", "widen")
    assert layout.shared == ("tower.calm",)
    assert layout.heads == ("out",)
    assert layout.norms == ("tower.last", "tower.unused")
    # A list that never runs and stands before the tower.
    assert layout.multimodal_encoders == ("scales.0", "scales.1", "scales.2")
    assert layout.trace.hidden_keyword == "states"
    assert all(isinstance(layout.trace.outputs[fqn], tuple) for fqn in layout.layer_fqns)


def test_the_order_of_modules_without_parameters_of_ones_own_layers() -> None:
    order = find_layout(Odd(OddConfig())).trace.order
    assert order == (
        "words", "widen", "tower.calm", "tower.floor.0", "tower.floor.1", "tower.floor.2",
        "tower.last", "out",
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_nothing_changes_and_nothing_is_computed(family: str, tiny: Tiny) -> None:
    model = tiny(family, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    find_layout(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_on_meta_it_is_the_same(family: str, tiny: Tiny) -> None:
    with torch.device("meta"):
        empty = tiny(family, 2)
    with init_empty_weights():
        half_empty = tiny(family, 2)
    layout = find_layout(tiny(family, 2))
    assert find_layout(empty) == layout
    assert find_layout(half_empty) == layout


def test_boundaries_say_shape_and_dtype(tiny: Tiny) -> None:
    trace = find_layout(tiny("llama", 2)).trace
    assert len(trace.crossings) == 3
    for crossing in trace.crossings:
        (slot,) = crossing.slots
        shape = slot.shape
        tensor = shape.tensor(3, 7)
        assert tensor.shape == (3, 7, 32)
        assert tensor.dtype == torch.float32
        assert tensor.requires_grad
        assert tensor.device.type == "meta"
        assert shape.batch_and_seq((3, 7, 32)) == (3, 7)
    assert [[p.fqn for p in c.slots[0].places] for c in trace.crossings] == [
        ["model.layers.0"], ["model.layers.1"], []
    ]  # fmt: skip


@pytest.mark.parametrize("hidden_size", [52, 104, 208])  # multiples of the length it traces with
def test_a_hidden_size_is_not_taken_for_a_length(hidden_size: int, tiny: Tiny) -> None:
    trace = find_layout(tiny("llama", 1, hidden_size=hidden_size)).trace
    assert trace.crossings[-1].slots[0].shape.tensor(2, 5).shape == (2, 5, hidden_size)


def test_dtype_to_come(tiny: Tiny) -> None:
    trace = find_layout(tiny("llama", 2), torch.bfloat16).trace
    assert {slot.shape.dtype for crossing in trace.crossings for slot in crossing.slots} == {
        torch.bfloat16
    }
    assert trace.outputs["model.embed_tokens"].sizes(2, 3) == [2, 3, 32]
    assert trace.outputs["model.embed_tokens"].dtype == torch.bfloat16
    assert trace.outputs["lm_head"].sizes(2, 3) == [2, 3, 64]


def test_no_list_of_layers() -> None:
    class Flat(PreTrainedModel):
        config_class = OddConfig

        def __init__(self, config: OddConfig) -> None:
            super().__init__(config)
            self.pair = nn.ModuleList([nn.Linear(2, 2)] * 2)

    with pytest.raises(ValueError, match="no list of decoder layers") as caught:
        find_layout(Flat(OddConfig(5)))
    assert "Flat" in str(caught.value)
    assert "num_hidden_layers=5" in str(caught.value)
    assert "pair (2)" in str(caught.value)
    with pytest.raises(ValueError, match="found none"):
        find_layout(nn.Linear(2, 2))


def test_a_forward_that_looks_at_values() -> None:
    class Nosy(Odd):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            if input_ids.sum().item() > 3:
                return super().forward(input_ids + 1)
            return super().forward(input_ids)

    with pytest.raises(RuntimeError, match="cannot follow the forward of Nosy"):
        find_layout(Nosy(OddConfig()))


def test_parameters_of_the_decoder_itself() -> None:
    class Bare(Odd):
        def __init__(self, config: OddConfig) -> None:
            super().__init__(config)
            for name in ("unused", "shift", "scale", "wherever"):
                setattr(self.tower, name, nn.Parameter(torch.ones(6)))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            states = self.widen(self.words(input_ids)) + self.tower.shift
            for block in self.tower.floor:
                states = block(states=states, flag=True)[0] * self.tower.wherever
            return self.out(self.tower.last(states) * self.tower.scale)

    layout = find_layout(Bare(OddConfig()))
    assert {"tower.unused", "tower.shift"} <= set(layout.first_stage)
    assert "tower.scale" in layout.last_stage
    assert [fqn for fqn, _ in layout.unplaceable] == ["tower.wherever"]


def test_a_module_that_runs_before_and_after() -> None:
    class Twice(Odd):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            states = self.tower.last(self.widen(self.words(input_ids)))
            for block in self.tower.floor:
                states = block(states=states, flag=True)[0]
            return self.out(self.tower.last(states))

    layout = find_layout(Twice(OddConfig()))
    assert layout.between == (("tower.last", 0),)
    assert layout.trace.cuts == ()
    assert {c.problem for c in layout.trace.crossings} == {"tower.last runs on both sides"}


def test_an_encoder_decoder_has_no_one_list() -> None:
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    with pytest.raises((ValueError, RuntimeError), match="T5ForConditionalGeneration"):
        find_layout(T5ForConditionalGeneration(config))
