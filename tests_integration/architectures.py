"""Tiny random models of the decoder architectures of Transformers.

What there is is read from Transformers' own causal-LM mapping, so that a new release is covered
by the same code. Configs come from `architectures.json`, in which every option of an architecture
is turned on, else from the architecture's default config, made tiny.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pp_patch_hf import shrink_config

ROWS = {
    row["model_type"]: row
    for row in json.loads(Path(__file__).with_name("architectures.json").read_text())
}
# What default configs leave open that no model can be built without.
_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}
COMPLETED: dict[str, dict[str, Any]] = {
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "xmod": {"default_language": "en_XX"},
}


def all_names() -> list[str]:
    """Return the model types of the mapping that are no encoder-decoders, and those of the rows."""
    names = set(ROWS)
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
        except Exception:  # tells why when its model is made
            config = None
        if not getattr(config, "is_encoder_decoder", False):
            names.add(name)
    return sorted(names)


def model_of(name: str) -> torch.nn.Module:
    """Return a tiny model of a model type.

    Raises:
        Exception: Whatever keeps Transformers from building it.
    """
    if name in ROWS:
        return make_model(ROWS[name])
    config = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return _jittered(AutoModelForCausalLM.from_config(shrink_config(config)))


def make_model(row: dict[str, Any]) -> torch.nn.Module:
    """Return the model of a row of `architectures.json`."""
    config_class = getattr(transformers, row["config_class"], None)
    if config_class is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {row['config_class']}")
    config = config_class(**row["overrides"])
    model_class = getattr(transformers, row["model_class"], None)
    if model_class is None:
        module = config_class.__module__.replace("configuration_", "modeling_")
        model_class = getattr(importlib.import_module(module), row["model_class"])
    torch.manual_seed(0)
    return _jittered(model_class._from_config(config))


def _jittered(model: torch.nn.Module) -> torch.nn.Module:
    """Norms start as ones and biases as zeros, under which many a fault would not show."""
    torch.manual_seed(0)
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model with every dropout at zero, for training mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for name, value in vars(config).items():
                if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
                    setattr(config, name, 0.0)
    return model


def padded(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a batch that is padded on the left and on the right."""
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if row["takes_position_ids"]:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def packed() -> dict[str, torch.Tensor]:
    """Return a batch whose rows are several texts, told apart by their positions."""
    starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1], [*range(7), *range(5)]])
    return {"input_ids": _ids(), "position_ids": starts}


def _ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
