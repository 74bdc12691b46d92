"""Tiny models of the architectures that every schedule is tested with, made from configs."""

from typing import Any

import torch
from architectures import ROWS, make_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

WINDOW = 4

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What makes each architecture differ from Llama is turned on.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "final_logit_softcapping": 5.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
    },
    # The fused experts know no float64.
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "experts_implementation": "eager",
    },
}


def tiny_config(family: str, num_layers: int, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a family in `FAMILIES`, for any of its model classes."""
    if family == "gpt2":
        base = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_positions": 64}
        base |= {"bos_token_id": 1, "eos_token_id": 2, "n_layer": num_layers}
    else:
        base = {**_LLAMA_LIKE, "num_hidden_layers": num_layers}
    settings = {**base, "tie_word_embeddings": False, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(family, **settings)
    assert isinstance(config, PreTrainedConfig)
    return config


def tiny_model(
    family: str, num_layers: int, dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    """Return a random model, the same in every process.

    Args:
        family: A name in `FAMILIES`, or a model type of `architectures.json`, which says itself
            how many layers it has.
        num_layers: How many layers.
        dtype: Of its parameters.
        **overrides: Further settings of the config.
    """
    if family not in FAMILIES:
        row = ROWS[family]
        return make_model({**row, "overrides": {**row["overrides"], **overrides}}).to(dtype).train()
    config = tiny_config(family, num_layers, **overrides)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    # Norms start as ones and biases as zeros, under which many a fault would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)
