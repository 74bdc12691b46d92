from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pp_split_hf import (
    BoundaryShape,
    IdentityStandIn,
    PassThroughLayer,
    Sizes,
    ZeroStandIn,
    find_layout,
    plan_stage_fqns,
    split_model_into_stages,
    stage_part,
)
from pp_split_hf.shapes import Dim

Tiny = Callable[..., PreTrainedModel]


def split(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(model, plan, range(len(plan)), layout)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("counts", [(3,), (1, 2), (0, 2, 1), (2, 0, 1, 0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stages_share_all_and_repeat_nothing(
    family: str, counts: tuple[int, ...], device: str, tiny: Tiny
) -> None:
    with torch.device(device):
        model = tiny(family, 3)
    whole = dict(model.named_parameters())
    parts = split(model, counts)
    seen: set[str] = set()
    for part in parts:
        mine = dict(part.named_parameters())
        assert not seen & mine.keys()
        seen |= mine.keys()
        for name, parameter in mine.items():
            assert parameter is whole[name]
    assert seen == whole.keys()
    buffers = dict(model.named_buffers())
    for part in parts:
        for name, buffer in part.named_buffers():
            assert buffer is buffers[name]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_state_dicts_add_up_to_the_whole(family: str, tiny: Tiny) -> None:
    model = tiny(family, 3)
    whole = model.state_dict()
    parts = [part.state_dict() for part in split(model, (1, 0, 2))]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    for part in parts:
        for name, tensor in part.items():
            assert tensor.data_ptr() == whole[name].data_ptr()
    assert "model.layers.2.mlp.down_proj.weight" not in parts[0] or family != "llama"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_model_stays_as_it_was(family: str, tiny: Tiny) -> None:
    model = tiny(family, 3)
    ids = torch.arange(10).reshape(2, 5)
    names = list(dict(model.named_modules()))
    kinds = [type(module) for module in model.modules()]
    logits = model(ids).logits
    split(model, (1, 2))
    assert list(dict(model.named_modules())) == names
    assert [type(module) for module in model.modules()] == kinds
    assert stage_part(model) is None
    assert torch.equal(model(ids).logits, logits)


def test_a_stage_has_the_structure_of_the_whole(tiny: Tiny) -> None:
    model = tiny("llama", 4)
    for index, part in enumerate(split(model, (1, 2, 1))):
        assert type(part) is type(model)
        assert part.config is not None
        assert len(part.model.layers) == 4
        stand_ins = [
            module
            for module in part.modules()
            if isinstance(module, PassThroughLayer | ZeroStandIn | IdentityStandIn)
        ]
        for stand_in in stand_ins:
            assert list(stand_in.parameters()) == list(stand_in.buffers()) == []
            assert stand_in.state_dict() == {}
        owned = [not isinstance(layer, PassThroughLayer) for layer in part.model.layers]
        assert owned == [[True, False, False, False], [False, True, True, False],
                         [False, False, False, True]][index]  # fmt: skip
        assert isinstance(part.model.embed_tokens, ZeroStandIn) == (index != 0)
        assert isinstance(part.model.norm, IdentityStandIn) == (index != 2)
        assert isinstance(part.lm_head, IdentityStandIn) == (index != 2)
        assert part.model.rotary_emb is not model.model.rotary_emb
        assert torch.equal(part.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_stage_part(tiny: Tiny) -> None:
    parts = [stage_part(part) for part in split(tiny("llama", 4), (0, 3, 1, 0))]
    told = [
        (p.stage_index, p.num_stages, p.first_layer, p.end_layer, p.is_first, p.is_last)
        for p in parts
        if p is not None
    ]
    assert told == [
        (0, 4, 0, 0, True, False),
        (1, 4, 0, 3, False, False),
        (2, 4, 3, 4, False, False),
        (3, 4, 4, 4, False, True),
    ]


def test_only_the_stages_asked_for(tiny: Tiny) -> None:
    model = tiny("llama", 4)
    plan = plan_stage_fqns(find_layout(model), (1, 1, 1, 1))
    third, first = split_model_into_stages(model, plan, [2, 0])
    assert {n.split(".")[2] for n, _ in third.named_parameters()} == {"2"}
    assert "model.embed_tokens.weight" in dict(first.named_parameters())
    assert split_model_into_stages(model, plan, []) == []


def test_stages_train_the_models_own_weights(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    first, _ = split(model, (1, 1))
    with torch.no_grad():
        first.model.layers[0].mlp.down_proj.weight.fill_(7.0)
    assert float(model.model.layers[0].mlp.down_proj.weight.detach().min()) == 7.0


def test_frozen_parameters_stay_frozen(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    model.model.layers[1].requires_grad_(False)
    _, second = split(model, (1, 1))
    assert not any(p.requires_grad for p in second.model.layers[1].parameters())
    assert second.lm_head.weight.requires_grad


def test_modes_are_a_stages_own(tiny: Tiny) -> None:
    model = tiny("llama", 2).eval()
    first, second = split(model, (1, 1))
    first.train()
    assert first.model.layers[0].training
    assert not model.training
    assert not second.model.layers[1].training


def test_tensors_that_are_no_parameters_are_shared_too() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.model.layers[0].note = torch.ones(3)
    first, second = split(model, (1, 1))
    assert first.model.layers[0].note is model.model.layers[0].note
    assert not hasattr(second.model.layers[0], "note")


def test_stand_ins_tell_what_models_read_from_outside(tiny: Tiny) -> None:
    model = tiny("gemma2", 4, sliding_window=4)
    for index, layer in enumerate(model.model.layers):
        layer.attention_type = ("sliding_attention", "full_attention")[index % 2]
    parts = split(model, (1, 3))
    for part in parts:
        told = [layer.attention_type for layer in part.model.layers]
        assert told == [layer.attention_type for layer in model.model.layers]
    assert parts[0].lm_head.weight.dtype == model.lm_head.weight.dtype
    assert parts[0].lm_head.weight.numel() == 0


def test_what_stand_ins_return() -> None:
    ids, states = torch.ones(2, 5, dtype=torch.long), torch.randn(2, 5, 8)
    shape = BoundaryShape((Dim(1, 0, True), Dim(0, 1, False), Dim(4, 0, False)), torch.bfloat16)
    zero = ZeroStandIn(nn.Embedding(3, 4), (shape, {"more": shape}, None), Sizes(2, 5))
    for given in (ids, states):
        out, others, nothing = zero(given, key=3)
        assert out.shape == others["more"].shape == (2, 5, 4)
        assert out.dtype == torch.bfloat16
        assert not out.any()
        assert nothing is None
    assert IdentityStandIn(nn.Linear(8, 8))(states, 3, key=4) is states
    for width, wanted in ((8, 8), (2, 2), (40, 8)):
        dims = (Dim(1, 0, True), Dim(0, 1, False), Dim(width, 0, False))
        shape = BoundaryShape(dims, states.dtype)
        got = IdentityStandIn(nn.Linear(8, width), shape)(states)
        assert torch.equal(got, states[..., :wanted])
    assert PassThroughLayer(nn.Linear(8, 8), None)(states, mask=None) is states
    assert PassThroughLayer(nn.Linear(8, 8), "states")(states=states, mask=None) is states
    [out] = PassThroughLayer(nn.Linear(8, 8), None, (shape,))(states)
    assert out is states
    listed = PassThroughLayer(nn.Linear(8, 8), None, [shape, shape, None])(states)
    assert listed[0] is states
    assert listed[1:] == [None, None]


def test_a_plan_that_does_not_fit(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        split_model_into_stages(
            model, [["model.embed_tokens"], ["model.layers.1", "lm_head"]], [0, 2, -1]
        )
    message = str(caught.value)
    for problem in (
        "no stage lists 'model.layers.0'",
        "no stage lists 'model.norm'",
        "there is no stage 2 among 2",
        "there is no stage -1 among 2",
    ):
        assert problem in message
