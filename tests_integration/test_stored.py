"""Checkpoints of every kind of architecture: names and tensors are those of Transformers.

What `save_pretrained` writes, the stages of a pipeline read as `from_pretrained` does, bit for bit;
what they write is what `save_pretrained` writes. With `PP_ALL_ARCHITECTURES=1` of the whole
causal-LM mapping, else of a selection in which every kind of conversion occurs.
"""

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import all_names, model_of
from safetensors.torch import load_file
from test_architectures import NOT_BUILT, REFUSED
from tiny_vlms import VLMS, tiny_vlm
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightTransform
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pp_split_hf import (
    ModelLayout,
    find_layout,
    init_empty_weights,
    load_stage_weights,
    plan_stage_fqns,
    save_pretrained_pipeline,
    split_model_into_stages,
    spread_over_stages,
)

SELECTION = (
    "deepseek_v4", "dory", "ernie4_5_moe", "exaone", "gpt2", "inkling2_loop_text", "inkling2_text",
    "lara_mini", "qwen3_5_text", "qwen3_moe", "sarvam_moe",
)  # fmt: skip
# Of models that cannot be cut.
ELSEWHERE = {"Chunk"}
NAMES = all_names() if os.environ.get("PP_ALL_ARCHITECTURES") else SELECTION


def made(name: str) -> PreTrainedModel:
    """Return a tiny model."""
    if name in VLMS:
        return tiny_vlm(name, 3, torch.float32)
    if name in NOT_BUILT:
        pytest.skip(f"cannot be built here: {NOT_BUILT[name]}")
    if name in REFUSED:
        pytest.skip(f"cannot be cut: {REFUSED[name]}")
    model = model_of(name)
    assert isinstance(model, PreTrainedModel)
    return model


def stages(model: PreTrainedModel, number: int, layout: ModelLayout) -> list[Any]:
    counts = spread_over_stages(layout, min(number, len(layout.trace.cuts) - 1))
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(model, plan, range(len(plan)), layout)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        content = load_file(file)
        assert not content.keys() & tensors.keys()
        tensors |= content
    return tensors


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def read_by_stages(
    model: PreTrainedModel, folder: Path, whole: PreTrainedModel, layout: ModelLayout
) -> None:
    """Read a checkpoint into stages of an empty model, and compare with the one that was read."""
    with init_empty_weights():
        empty = type(model)(copy.deepcopy(model.config))
    state: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for part in stages(empty, 2, layout):
        load_stage_weights(part, folder, "cpu")
        for name, tensor in part.state_dict().items():
            assert name not in state or torch.equal(state[name], tensor), name
            state[name] = tensor
        buffers |= dict(part.named_buffers())
    same(state, whole.state_dict())
    wanted = dict(whole.named_buffers())
    same({name: buffers[name] for name in wanted}, wanted)


def written_by_stages(model: PreTrainedModel, folder: Path, layout: ModelLayout) -> None:
    """Write a model in stages and as a whole."""
    theirs_folder = folder.with_name(f"{folder.name} by Transformers")
    save_pretrained_pipeline(stages(model, 3, layout), folder, max_shard_size=100_000)
    model.save_pretrained(theirs_folder)
    same(stored(folder), stored(theirs_folder))
    for name in ("config.json", "generation_config.json"):
        ours, theirs = folder / name, theirs_folder / name
        assert ours.exists() == theirs.exists()
        assert not ours.exists() or ours.read_text() == theirs.read_text()


@pytest.mark.parametrize("name", [*NAMES, *VLMS])
def test_stored_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = made(name)
    copied = copy.deepcopy(model)  # saving changes a model's config
    model.save_pretrained(tmp_path / "first")
    whole = type(model).from_pretrained(tmp_path / "first", dtype=torch.float32)
    layout = find_layout(copied)  # which takes time, and is the same for all
    read_by_stages(copied, tmp_path / "first", whole, layout)
    written_by_stages(copied, tmp_path / "made", layout)
    if whole.config.model_type == type(whole.config).model_type:
        written_by_stages(whole, tmp_path / "read", layout)
    else:
        # One that is read as another architecture, and saved with a config of that: the names that
        # Transformers writes it does not find again.
        save_pretrained_pipeline(stages(whole, 3, layout), tmp_path / "read")
    again = type(model).from_pretrained(tmp_path / "read", dtype=torch.float32)
    same(again.state_dict(), whole.state_dict())


def kinds(transforms: Iterable[WeightTransform]) -> set[str]:
    """Return the kinds of transforms, and of what they do."""
    found = set()
    for transform in transforms:
        found.add(type(transform).__name__)
        if isinstance(transform, WeightConverter):
            found |= {type(operation).__name__ for operation in transform.operations}
    return found


def test_every_kind_of_conversion_is_among_them() -> None:
    """A new kind shows here before it shows in somebody's weights."""
    registered: set[str] = set()
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (model_type, class_name):
            registered |= kinds(get_checkpoint_conversion_mapping(name) or ())
    covered: set[str] = set()
    for name in (*SELECTION, *VLMS):
        with init_empty_weights():
            covered |= kinds(get_model_conversion_mapping(made(name)))
    assert registered - covered == ELSEWHERE
