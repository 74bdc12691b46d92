from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from pp_split_hf import init_empty_weights

Tiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_parameters_are_empty_and_buffers_real(family: str, tiny: Tiny) -> None:
    with init_empty_weights():
        empty = tiny(family, 3)
    real = tiny(family, 3)
    assert all(p.device.type == "meta" for p in empty.parameters())
    shapes = {n: (p.shape, p.dtype, p.requires_grad) for n, p in empty.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()}
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    for name, buffer in real.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_llama_has_a_buffer_to_lose(tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny("llama", 1)
    table = model.model.rotary_emb.inv_freq
    assert table.device.type == "cpu"
    assert float(table[0]) == 1.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_tie_is_still_a_tie(family: str, tiny: Tiny) -> None:
    with init_empty_weights():
        model = tiny(family, 2, tie_word_embeddings=True)
    head = model.get_output_embeddings().weight
    assert head.device.type == "meta"
    assert head is model.get_input_embeddings().weight


def test_a_tie_by_hand_and_what_is_set_on_parameters() -> None:
    with init_empty_weights():
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
        frozen = nn.Linear(2, 2)
        marked = nn.Parameter(torch.zeros(2), requires_grad=False)
        marked.is_special = True  # type: ignore[attr-defined]
        frozen.bias = marked
    assert head.weight is embedding.weight
    assert frozen.bias.device.type == "meta"
    assert not frozen.bias.requires_grad
    assert frozen.bias.is_special


def test_it_ends_with_its_context() -> None:
    def fail() -> None:
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.device.type == "meta"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_modules_without_a_bias() -> None:
    with init_empty_weights():
        layer = nn.Linear(2, 2, bias=False)
    assert layer.bias is None
