from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from pp_patch_hf.shrink import shrink_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}

# What the default config of a type leaves off is turned on.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "bos_token_id": 128000, "eos_token_id": [128001, 128009]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 16},
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "gemma2": {"final_logit_softcapping": 20.0},
    "gemma3_text": {},
    "gemma3n_text": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neo": {},
    "mamba2": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "jamba": {},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "falcon_h1": {
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "key_multiplier": 0.4,
    },
    "granitemoehybrid": {
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(32)],
        "residual_multiplier": 0.22,
        "num_local_experts": 32,
        "num_experts_per_tok": 6,
    },
    "nemotron_h": {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-", "num_hidden_layers": 20},
    "phi3": {"max_position_embeddings": 131072, "rope_parameters": LONGROPE},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16},
    "gpt_oss": {},
    "dory": {},
    "zamba2": {},
}
KIND_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")


def make(model_type: str, **overrides: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**CONFIGS.get(model_type, {}), **overrides})


def run(config: PretrainedConfig) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return model


def kinds(config: PretrainedConfig) -> set[tuple[str, ...]]:
    lists = [value for name in KIND_LISTS if (value := getattr(config, name, None))]
    return set(zip(*lists, strict=True))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_small_with_every_kind_and_option(model_type: str) -> None:
    config = make(model_type)
    before, state = config.to_dict(), torch.get_rng_state()
    small = shrink_config(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert type(small) is type(config)
    assert sum(p.numel() for p in run(small).parameters()) < 2_000_000
    assert 4 <= small.num_hidden_layers <= 8
    assert kinds(small) == kinds(config)
    after = small.to_dict()
    for name, value in before.items():
        if value is None or isinstance(value, bool | float | str):
            assert after[name] == value, name


def test_sizes_keep_their_relations() -> None:
    small = shrink_config(make("llama"))
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert small.hidden_size == 4 * small.head_dim
    small = shrink_config(make("qwen3", hidden_size=2560, head_dim=128, num_key_value_heads=8))
    assert small.hidden_size < small.num_attention_heads * small.head_dim
    small = shrink_config(make("bamba"))
    assert small.mamba_n_heads * small.mamba_d_head == small.mamba_expand * small.hidden_size
    small = shrink_config(make("deepseek_v3"))
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    assert small.n_routed_experts % small.n_group == 0 < small.topk_group < small.n_group
    assert small.num_experts_per_tok <= small.n_routed_experts // small.n_group * small.topk_group


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss", "qwen2", "gpt_neo"])
def test_a_window_cuts_twelve_positions(model_type: str) -> None:
    small = shrink_config(make(model_type))
    window = small.window_size if model_type == "gpt_neo" else small.sliding_window
    assert 0 < window < 12


def test_token_ids_stay_apart() -> None:
    config = make("llama", vocab_size=128256, pad_token_id=128004)
    small = shrink_config(config)
    ids = [small.bos_token_id, small.pad_token_id, *small.eos_token_id]
    assert len(set(ids)) == 4
    assert max(ids) < small.vocab_size == 128
    config = make("llama", bos_token_id=1, eos_token_id=2, pad_token_id=2)
    small = shrink_config(config)
    assert (small.bos_token_id, small.eos_token_id, small.pad_token_id) == (1, 2, 2)


def test_layers_that_other_values_count_or_name() -> None:
    small = shrink_config(make("deepseek_v3"))
    assert 0 < small.first_k_dense_replace < small.num_hidden_layers
    small = shrink_config(make("qwen2"))
    assert small.max_window_layers == 2
    assert small.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    small = shrink_config(make("bamba"))
    assert small.attn_layer_indices == [2, 3]
    small = shrink_config(make("lfm2"))
    assert small.full_attn_idxs == [2, 3]
    small = shrink_config(make("gemma3n_text"))
    assert small.num_kv_shared_layers == 2
    assert len(small.intermediate_size) == small.num_hidden_layers
    small = shrink_config(make("jamba"))  # a period has to fit
    assert small.num_hidden_layers == small.attn_layer_period == 8
    small = shrink_config(make("gemma4_text"))
    full = [i for i, kind in enumerate(small.layer_types) if kind == "full_attention"]
    assert [int(i) for i in small.to_dict()["per_layer_config"]] == full


def test_rotary_lists_fit_the_head() -> None:
    small = shrink_config(make("phi3"))
    half = small.hidden_size // small.num_attention_heads // 2
    assert len(small.rope_parameters["short_factor"]) == half
    assert small.rope_parameters["original_max_position_embeddings"] < small.max_position_embeddings
    small = shrink_config(make("qwen2_vl", text_config={"rope_parameters": MROPE})).text_config
    sections = small.rope_parameters["mrope_section"]
    assert sum(sections) == small.hidden_size // small.num_attention_heads // 2
    assert min(sections) > 0


def test_vision_part() -> None:
    text = {"hidden_size": 3584, "num_attention_heads": 28, "rope_parameters": MROPE}
    small = shrink_config(make("qwen2_vl", text_config={**text, "num_key_value_heads": 4}))
    assert small.vision_config.hidden_size == small.text_config.hidden_size
    assert small.vision_config.depth <= 8
    assert small.image_token_id < small.text_config.vocab_size
    assert shrink_config(make("gemma3"), 9).text_config.num_hidden_layers == 9


@pytest.mark.parametrize("num_layers", [1, 3, 5, 40])
def test_asked_for_layers(num_layers: int) -> None:
    small = shrink_config(make("gemma2"), num_layers)
    assert small.num_hidden_layers == len(small.layer_types) == num_layers
    run(small)


def test_again_changes_little() -> None:
    once = shrink_config(make("qwen3_moe"))
    again = shrink_config(once)
    assert again.to_dict() == once.to_dict()


def test_implementations_are_kept_and_quantization_is_not() -> None:
    config = make("mixtral", attn_implementation="eager", experts_implementation="eager")
    config.quantization_config = {"quant_method": "fp8"}
    small = shrink_config(config)
    assert small._attn_implementation == small._experts_implementation == "eager"
    assert not hasattr(small, "quantization_config")


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(
        self,
        vocabulary_size: int = 50000,
        max_context_length: int = 4096,
        num_transformer_layers: int = 16,
        model_dim: int = 1280,
        head_dim: int = 64,
        num_query_heads: list[int] | None = None,
        num_kv_heads: list[int] | None = None,
        ffn_multipliers: list[float] | None = None,
        mixer_pattern: str = "aabaabaabaabaaba",
        logit_divisor: float = 3.5,
        **kwargs: Any,
    ) -> None:
        layers = num_transformer_layers
        self.vocabulary_size = vocabulary_size
        self.max_context_length = max_context_length
        self.num_transformer_layers = layers
        self.model_dim = model_dim
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads or [12 + 4 * (i // 8) for i in range(layers)]
        self.num_kv_heads = num_kv_heads or [3 + i // 8 for i in range(layers)]
        self.ffn_multipliers = ffn_multipliers or [0.5 + 0.25 * i for i in range(layers)]
        self.mixer_pattern = mixer_pattern
        self.logit_divisor = logit_divisor
        super().__init__(**kwargs)


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        width = config.model_dim
        self.embed = nn.Embedding(config.vocabulary_size, width)
        self.layers = nn.ModuleList(
            nn.Linear(width, width) for _ in range(config.num_transformer_layers)
        )
        if not len(config.mixer_pattern) == len(config.num_kv_heads) == len(self.layers):
            raise ValueError("lists do not match the layers")
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return CausalLMOutput(logits=hidden @ self.embed.weight.T / self.config.logit_divisor)


@pytest.mark.parametrize("registered", [False, True])
def test_a_class_with_names_of_its_own(registered: bool) -> None:
    if registered:
        AutoConfig.register("odd", OddConfig, exist_ok=True)
        AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)
    small = shrink_config(OddConfig())
    assert isinstance(small, OddConfig)
    assert set(small.mixer_pattern) == {"a", "b"}
    assert len(small.mixer_pattern) == small.num_transformer_layers == len(small.ffn_multipliers)
    assert all(q % kv == 0 for q, kv in zip(small.num_query_heads, small.num_kv_heads, strict=True))
    assert small.vocabulary_size == small.max_context_length == 128
    assert small.logit_divisor == 3.5
    OddModel(small)(torch.zeros(1, 3, dtype=torch.long))


def test_refusals_say_why() -> None:
    with pytest.raises(ValueError, match="num_layers is 0"):
        shrink_config(make("llama"), 0)
    with pytest.raises(ValueError, match=r"LlamaConfig runs.*(?s:.)*KeyError.*nonsense"):
        shrink_config(make("llama", hidden_act="nonsense"))
