"""Tiny random models of the decoder architectures of Transformers."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROWS = {
    row["model_type"]: row
    for row in json.loads(Path(__file__).with_name("architectures.json").read_text())
}


def make_model(row: dict[str, Any]) -> torch.nn.Module:
    config_class = getattr(transformers, row["config_class"], None)
    if config_class is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {row['config_class']}")
    config = config_class(**row["overrides"])
    model_class = getattr(transformers, row["model_class"], None)
    if model_class is None:
        module = config_class.__module__.replace("configuration_", "modeling_")
        model_class = getattr(importlib.import_module(module), row["model_class"])
    torch.manual_seed(0)
    model = model_class._from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def padded(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if row["takes_position_ids"]:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs
