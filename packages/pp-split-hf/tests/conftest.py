from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

torch.set_num_threads(1)  # tensors this small are faster on one


def make_model(
    family: str, num_layers: int, bare: bool = False, **overrides: Any
) -> PreTrainedModel:
    if family == "gpt2":
        settings: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_positions": 64}
        settings["n_layer"] = num_layers
    else:
        settings = {
            "hidden_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        }
    settings |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {"tie_word_embeddings": False, **overrides}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(11)
    made = (AutoModel if bare else AutoModelForCausalLM).from_config(config)
    return made.eval()


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    """Makes a small random model: `tiny(family, num_layers, bare=False, **config)`."""
    return make_model
