"""Where the model comes from: what its config.json tells before anything is loaded."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelSource:
    """What the options must agree with."""

    num_layers: int
    """Decoder layers."""
    max_positions: int | None = None
    """The longest sequence, if there is one."""
    name: str | None = None
    """What `from_pretrained` takes; None for the new small model, whose tokens are bytes."""

    def count_tokens(self, text: str, enough: int) -> int:
        """Count the tokens of `text`, no further than is needed to know that there are `enough`."""
        # A token is a byte or more, and seldom more than a word; a long text needs no counting.
        num_bytes = len(text.encode())
        if self.name is None or num_bytes < enough or num_bytes > 100 * enough:
            return num_bytes
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.name)
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


SMALL_MODEL = ModelSource(num_layers=8)
"""The model that is built if none is named; `model.small_config` has the rest of it."""


def read_source(model: str | None) -> ModelSource:
    """Read what `--model` names, without loading a weight.

    Raises:
        ValueError: If it is no causal language model; the message tells what is there instead.
    """
    if model is None:
        return SMALL_MODEL
    path = Path(model)
    if path.is_file():
        raise ValueError("is a file; name the folder that holds config.json and the weights")
    if path.is_dir():
        config = _read_config(path / "config.json")
        _check_files(path)
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError("there is no such folder")
    else:
        config = _read_config(_fetch_config(model))
    text_config = config.get("text_config") or config
    num_layers = _first_of(text_config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if config.get("is_encoder_decoder"):
        raise ValueError("is an encoder-decoder model; only decoder-only models are supported")
    if num_layers is None:
        raise ValueError("config.json names no number of layers; it is no causal language model")
    _check_type(config.get("model_type"))
    max_positions = _first_of(text_config, "max_position_embeddings", "n_positions")
    return ModelSource(num_layers, max_positions, model)


def _first_of(config: dict[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError("has no config.json, so it is no Hugging Face checkpoint")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("config.json holds no settings")
    return config


def _check_type(model_type: object) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"config.json has model_type {model_type!r}, for which the installed Transformers has "
            "no causal language model"
        )


def _check_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError("has no tokenizer; save the model's tokenizer into the same folder")
    index = folder / _INDEX
    if (folder / _WEIGHTS).is_file():
        names = [_WEIGHTS]
    elif index.is_file():
        names = sorted(set(_read_config(index).get("weight_map", {}).values()))
    elif any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            "has its weights in pickles (pytorch_model*.bin), which cannot be read in part; load "
            "it once with from_pretrained and save it again with save_pretrained"
        )
    else:
        raise ValueError(f"has no weights: neither {_WEIGHTS} nor {_INDEX}")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{index.name} lists {name}, which is missing")
        _check_safetensors(folder / name)


def _check_safetensors(path: Path) -> None:
    """Refuse a file without the safetensors header: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        try:
            whole = 0 < length <= path.stat().st_size - 8
            header = json.loads(file.read(length)) if whole else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file, or is cut short")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if path.stat().st_size < 8 + length + max(ends, default=0):
        raise ValueError(f"{path.name} is cut short")


def _fetch_config(model: str) -> Path:
    """Return the hub's config.json: from the cache if it is there, else downloaded."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            return Path(hf_hub_download(model, "config.json", local_files_only=True))
        except LocalEntryNotFoundError:
            # Ask once, briefly: a download would retry for half a minute without a network.
            HfApi().model_info(model, timeout=10)
            return Path(hf_hub_download(model, "config.json"))
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"is neither a folder here nor a model of the Hugging Face Hub ({reason})"
        ) from error
