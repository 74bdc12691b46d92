from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from pp_split_hf import (
    check_pipeline_support,
    validate_hf_model_for_pipeline_support,
)

Tiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "mistral", "granite"])
@pytest.mark.parametrize("bare", [False, True])
def test_models_that_can_be_cut(family: str, bare: bool, tiny: Tiny) -> None:
    model = tiny(family, 2, bare)
    assert check_pipeline_support(model) == []
    validate_hf_model_for_pipeline_support(model)


def test_an_encoder_decoder() -> None:
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    [problem] = check_pipeline_support(model)
    assert "T5Config is of an encoder-decoder model" in problem
    with pytest.raises(ValueError, match="cannot be trained in pipeline stages"):
        validate_hf_model_for_pipeline_support(model)


def bert(**settings: bool) -> BertConfig:
    return BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("head", [BertForSequenceClassification, BertForMaskedLM])
def test_an_encoder(head: type[PreTrainedModel]) -> None:
    [problem] = check_pipeline_support(head(bert(is_decoder=False)))
    assert "BertConfig is of an encoder-only model" in problem
    assert "is_decoder=True" in problem


def test_an_encoder_as_a_decoder() -> None:
    assert check_pipeline_support(BertLMHeadModel(bert(is_decoder=True))) == []


def test_a_model_without_layers() -> None:
    [problem] = check_pipeline_support(nn.Linear(2, 2))
    assert "no list of decoder layers" in problem


def test_a_tie_that_meta_construction_lost(tiny: Tiny) -> None:
    with torch.device("meta"):
        model = tiny("llama", 2, tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.empty(64, 32, device="meta"))
    [problem] = check_pipeline_support(model)
    assert "lm_head.weight and model.embed_tokens.weight are declared as one weight" in problem
    assert "would be trained apart" in problem
    with torch.device("meta"):
        assert check_pipeline_support(tiny("llama", 2)) == []


def llama(**overrides: int) -> LlamaConfig:
    settings = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2} | overrides
    return LlamaConfig(
        num_attention_heads=4, intermediate_size=48, tie_word_embeddings=False, **settings
    )


def test_layers_that_do_not_run_once_each_in_order() -> None:
    class Twice(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
            self.model(input_ids=input_ids, use_cache=False)
            return super().forward(input_ids=input_ids, **kwargs)

    problems = check_pipeline_support(Twice(llama()))
    assert problems == [
        "Twice cannot be cut before layer 1: layer 0 runs again after layer 1 has run"
    ]


def twice(self: LlamaForCausalLM, input_ids: torch.Tensor, **kwargs: object) -> object:
    self.model(input_ids=input_ids, use_cache=False)
    return LlamaForCausalLM.forward(self, input_ids=input_ids, **kwargs)


def test_all_problems_at_once() -> None:
    class Odd(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.offset = nn.Parameter(torch.zeros(32))

        def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
            states = self.model.embed_tokens(input_ids)
            for _ in range(2):
                positions = torch.arange(input_ids.shape[1])[None]
                tables = self.model.rotary_emb(states, positions)
                for layer in self.model.layers:
                    states = layer(states, position_embeddings=tables) + self.offset
            return self.lm_head(self.model.norm(states))

    model = Odd(llama(num_hidden_layers=3))
    problems = check_pipeline_support(model)
    assert len(problems) == 3
    assert problems[0] == "offset: a parameter that is used before and after a layer"
    assert problems[1].startswith("Odd cannot be cut before layer 1: layer 0 runs again")
    assert problems[2].startswith("Odd cannot be cut before layer 2: layer 1 runs again")
    with pytest.raises(ValueError, match="Odd cannot be trained") as caught:
        validate_hf_model_for_pipeline_support(model)
    assert all(problem in str(caught.value) for problem in problems)
