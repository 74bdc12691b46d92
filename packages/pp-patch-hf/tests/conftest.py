from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

torch.set_num_threads(1)  # tensors this small are faster on one

LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

# What makes each architecture differ from Llama is turned on.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 5.0},
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
        "sliding_window": 4,
        "experts_implementation": "eager",
    },
}


def make_model(
    family: str, num_layers: int, bare: bool = False, **overrides: Any
) -> PreTrainedModel:
    if family == "gpt2":
        base: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_positions": 64, "n_layer": num_layers}
    else:
        base = {**LLAMA_LIKE, "num_hidden_layers": num_layers}
    base |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **{**base, **FAMILIES[family], **overrides})
    torch.manual_seed(11)
    model = (AutoModel if bare else AutoModelForCausalLM).from_config(config)
    # Norms start as ones and biases as zeros, under which many a fault would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    """Makes a small random model: `tiny(family, num_layers, bare=False, **config)`."""
    return make_model
