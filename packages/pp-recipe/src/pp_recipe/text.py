"""The text that a run reads: found on every Python, cut into batches."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


class TextError(ValueError):
    """A text cannot be used; the message reads on from the text's name."""


def read_text(path: str | None) -> str:
    """Read the text to train on.

    Args:
        path: A text file, or None for the text that Python brings along.

    Raises:
        TextError: If the file cannot be read as text.
    """
    if path is None:
        return builtin_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"is no UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise TextError(f"cannot be read: {error.strerror}") from error


def builtin_text() -> str:
    """Return the language manual inside `pydoc`, or the standard library's docstrings."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return "\n\n".join(_standard_docstrings())
    return "\n".join(topics[name] for name in sorted(topics))


def _standard_docstrings() -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer whose 256 ids are the bytes of the text in UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet prints each byte as one character: itself where that is visible,
    # else a stand-in from 256 on, given out in the order of the bytes.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte): byte for byte in visible}
    vocabulary |= {chr(256 + place): byte for place, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def draw_batch(
    tokens: "Tensor", batch_size: int, seq_len: int, seed: int, step: int
) -> "tuple[Tensor, Tensor]":
    """Return `(input_ids, labels)` of one step, both `[batch_size, seq_len]`.

    The passages depend on the seed and the step alone, so every rank draws the same. The labels
    are the ids one token further on.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(tokens) - seq_len, (batch_size, 1), generator=generator)
    passages = tokens[starts + torch.arange(seq_len + 1)]
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()
