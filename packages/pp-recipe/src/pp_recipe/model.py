"""The model of a run: a new small one, or a checkpoint."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pp_recipe.options import TrainOptions
from pp_recipe.source import SMALL_MODEL
from pp_recipe.text import byte_tokenizer
from pp_split_hf import init_empty_weights, resolve_checkpoint


def small_config(seq_len: int) -> LlamaConfig:
    """Return the config of the new model: Llama-style, bytes as tokens."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=SMALL_MODEL.num_layers,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=max(512, seq_len),
        initializer_range=0.05,  # with the usual 0.02 so narrow a model learns slowly
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def build_model(options: TrainOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, without weights, and its tokenizer.

    It is on the meta device: each rank later makes or reads the weights of its own stages only.
    """
    if options.model is None:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(small_config(options.seq_len))
        return model, byte_tokenizer()
    folder = resolve_checkpoint(options.model)
    with init_empty_weights():
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)
