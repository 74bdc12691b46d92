"""Every architecture is exact when cut anywhere, or refused with the reason; none is ever wrong.

Tiny random models of decoder architectures of Transformers, whole against chained stages in one
process: every cut into two, three stages, plain and padded (left and right) inputs, logits and all
gradients. With `PP_ALL_ARCHITECTURES=1` all of them run, else a selection.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pp_patch_hf import verify_pipeline
from pp_split_hf import check_pipeline_support

ROWS = {
    row["model_type"]: row
    for row in json.loads(Path(__file__).with_name("architectures.json").read_text())
}
# Layers that need more than the hidden states, that run more than once, or whose shapes depend on
# values when they are traced without any: refused, and by these words.
REFUSED = {
    "cpmant": "only the hidden states cross",
    "dbrx": "on fake tensors",
    "dory": "do not run once each and in order",
    "gemma3n_text": "only the hidden states cross",
    "gemma4_text": "only the hidden states cross",
    "glm_moe_dsa": "only the hidden states cross",
    "hrm_text": "do not run once each and in order",
    "hy_v4": "only the hidden states cross",
    "inkling2_loop_text": "do not run once each and in order",
    "inkling2_text": "only the hidden states cross",
    "longcat_flash": "on fake tensors",
    "zamba": "only the hidden states cross",
    "zamba2": "only the hidden states cross",
}
# Reads the dtype of its own first parameter, so a stage must have a layer or the embedding.
NO_EMPTY_STAGE = ("openai-gpt",)
# One for each way in which an architecture differs: positions, multipliers, hidden shapes, layers
# that return tuples or lists, recurrences, experts, embeddings that are more than a table.
SELECTION = (
    "bloom", "cohere2", "ctrl", "deepseek_v4", "falcon_h1", "gpt_neox", "gpt_oss", "jamba", "lfm2",
    "mamba2", "minicpm3", "modernbert-decoder", "openai-gpt", "opt", "phi", "recurrent_gemma",
    "rwkv", "xglm", "xlnet", *REFUSED,
)  # fmt: skip
NAMES = (
    sorted(ROWS) if os.environ.get("PP_ALL_ARCHITECTURES") else sorted(set(SELECTION) & set(ROWS))
)


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


@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(name: str) -> None:
    row = ROWS[name]
    model = make_model(row)
    problems = check_pipeline_support(model)
    if name in REFUSED:
        assert any(REFUSED[name] in problem for problem in problems), problems
        return
    assert problems == []
    num_layers = model.config.get_text_config().num_hidden_layers
    first = 1 if name in NO_EMPTY_STAGE else 0
    splits = [(cut, num_layers - cut) for cut in range(first, num_layers + 1 - first)]
    splits.append((1, num_layers - 2, 1))
    for inputs in (None, padded(row)):
        report = verify_pipeline(model, splits=splits, inputs=inputs, rtol=1e-5)
        assert report.exact, f"\n{report}"
