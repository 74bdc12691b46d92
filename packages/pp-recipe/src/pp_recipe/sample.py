"""A few words of what the model has learned."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The "


def write_sample(checkpoint: Path, max_new_tokens: int = 160) -> str:
    """Load a checkpoint as anyone would, and let it go on from a short prompt."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    tokens = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))
