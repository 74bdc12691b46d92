"""What stages write is what `save_pretrained` writes of the whole model."""

import importlib.util
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pp_split_hf import (
    find_layout,
    init_empty_weights,
    load_stage_weights,
    plan_stage_fqns,
    save_pretrained_pipeline,
    split_model_into_stages,
)

Tiny = Callable[..., PreTrainedModel]
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def stages(model: nn.Module, counts: tuple[int, ...] = (1, 0, 2)) -> list[nn.Module]:
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(model, plan, range(len(plan)), layout)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("family", SETTINGS)
def test_one_file(family: str, read: bool, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(family, 3, **SETTINGS[family]).to(torch.bfloat16)
    if read:
        model.save_pretrained(tmp_path / "first")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    save_pretrained_pipeline(stages(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    names = [file.name for file in (tmp_path / "theirs").iterdir()]
    assert sorted(names) == sorted(file.name for file in (tmp_path / "ours").iterdir())
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name in (name for name in names if name.endswith(".json")):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_several_files(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_moe", 3, **SETTINGS["qwen3_moe"])
    folder = tmp_path / "ours"
    save_pretrained_pipeline(stages(model), folder, max_shard_size=40_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    # A layer is not divided, however small the limit.
    largest = sum(p.nbytes for p in model.model.layers[0].parameters())
    for file in files:
        assert sum(t.nbytes for t in load_file(file).values()) <= max(40_000, largest)
    ours, theirs = (
        json.loads((tmp_path / which / "model.safetensors.index.json").read_text())
        for which in ("ours", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    for name, file_name in ours["weight_map"].items():
        assert name in load_file(folder / file_name)
    again = AutoModelForCausalLM.from_pretrained(folder)
    same(again.state_dict(), model.state_dict())


def test_what_was_read_is_written_as_it_was(tiny: Tiny, tmp_path: Path) -> None:
    whole = tiny("qwen3_moe", 3, **SETTINGS["qwen3_moe"])
    whole.save_pretrained(tmp_path / "first")
    with init_empty_weights():
        parts = stages(tiny("qwen3_moe", 3, **SETTINGS["qwen3_moe"]))
    for part in parts:
        load_stage_weights(part, tmp_path / "first", "cpu")
    save_pretrained_pipeline(parts, tmp_path / "second")
    same(stored(tmp_path / "second"), stored(tmp_path / "first"))


def test_a_tie_made_by_hand_is_written_under_all_its_names(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama", 3)
    model.lm_head.weight = model.model.embed_tokens.weight
    for counts in ((3,), (1, 2)):
        save_pretrained_pipeline(stages(model, counts), tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        same(again.state_dict(), model.state_dict())


class Words:
    """Saves itself as a tokenizer does."""

    def save_pretrained(self, save_directory: Path) -> None:
        (save_directory / "words.txt").write_text("a b")


def test_what_is_saved_along(tiny: Tiny, tmp_path: Path) -> None:
    save_pretrained_pipeline(stages(tiny("llama", 3)), tmp_path / "saved", tokenizer=Words())
    assert (tmp_path / "saved" / "words.txt").read_text() == "a b"


def test_the_dtype_in_the_config_is_that_of_the_first_parameter(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama", 3).to(torch.bfloat16)
    model.lm_head.float()
    save_pretrained_pipeline(stages(model), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored(tmp_path / "saved")["lm_head.weight"].dtype == torch.float32


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_modes_follow_the_umask(umask: int, tiny: Tiny, tmp_path: Path) -> None:
    save_pretrained_pipeline(stages(tiny("llama", 3)), tmp_path / "a" / "saved", tokenizer=Words())
    for path in [tmp_path / "a" / "saved", *(tmp_path / "a" / "saved").iterdir()]:
        base = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == base & ~umask, path


def refused(parts: list[nn.Module], path: Path, **options: Any) -> str:
    with pytest.raises(RuntimeError, match="could not be written:\n  ") as caught:
        save_pretrained_pipeline(parts, path, **options)
    assert not path.with_name(f".{path.name}.partial").exists()
    return str(caught.value)


def test_what_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    parts, path = stages(tiny("llama", 3)), tmp_path / "saved"
    message = refused(parts[:2], path)
    assert "no rank has 20 of the model's tensors (model.layers.1." in message
    assert "every rank passes all of its stages" in message
    assert "there are no parts" in refused([], path)
    assert "modules that split_model_into_stages made" in refused([tiny("llama", 1)], path)
    with init_empty_weights():
        assert "without values" in refused(stages(tiny("llama", 3)), path)
    assert "max_shard_size='5GB' must be a number of bytes" in refused(
        parts, path, max_shard_size="5GB"
    )
    assert not path.exists()


def test_what_is_no_checkpoint_is_not_replaced(tiny: Tiny, tmp_path: Path) -> None:
    parts = stages(tiny("llama", 3))
    (tmp_path / "work").mkdir()
    save_pretrained_pipeline(parts, tmp_path / "work")  # an empty folder is fine
    save_pretrained_pipeline(parts, tmp_path / "work")  # and a checkpoint
    for file in (tmp_path / "work").glob("*.safetensors"):
        file.rename(tmp_path / "work" / "results.safetensors")
    assert "folder of that name that is no checkpoint, and not empty" in refused(
        parts, tmp_path / "work"
    )
    assert (tmp_path / "work" / "results.safetensors").exists()
    (tmp_path / "file").write_text("mine")
    assert "there is a file of that name" in refused(parts, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_through_links_and_the_folder_itself(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = stages(tiny("llama", 3))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        save_pretrained_pipeline(parts, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "model.safetensors").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_pretrained_pipeline(parts, ".")
    assert (tmp_path / "here" / "model.safetensors").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


OwnConfig.register_for_auto_class()
OwnForCausalLM.register_for_auto_class("AutoModelForCausalLM")
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that defines a model of its own."""
    file = tmp_path / "modeling_own.py"
    file.write_text(CODE)
    spec = importlib.util.spec_from_file_location("modeling_own", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_own"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["modeling_own"]


def test_code_of_a_model_is_copied_along(own_code: ModuleType, tmp_path: Path) -> None:
    base = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = own_code.OwnForCausalLM(own_code.OwnConfig(**base.to_dict()))
    save_pretrained_pipeline(stages(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours" / "modeling_own.py").read_text() == CODE
    ours, theirs = (
        json.loads((tmp_path / which / "config.json").read_text()) for which in ("ours", "theirs")
    )
    assert ours == theirs
    assert ours["auto_map"]["AutoModelForCausalLM"] == "modeling_own.OwnForCausalLM"
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
