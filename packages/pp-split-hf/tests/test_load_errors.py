"""What is wrong with a checkpoint is said at once, before anything is read."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from pp_split_hf import (
    CheckpointError,
    find_layout,
    init_empty_weights,
    load_stage_weights,
    plan_stage_fqns,
    resolve_checkpoint,
    split_model_into_stages,
)

Tiny = Callable[..., PreTrainedModel]
Change = Callable[[Path], Any]


@pytest.fixture
def part(tiny: Tiny) -> nn.Module:
    with init_empty_weights():
        model = tiny("llama", 3)
    layout = find_layout(model)
    return split_model_into_stages(model, plan_stage_fqns(layout, (1, 2)), [1], layout)[0]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint in several files."""
    tiny("llama", 3).save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def refused(part: nn.Module, checkpoint: Path | str, **options: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_stage_weights(part, checkpoint, "cpu", **options)
    assert all(p.device.type == "meta" for p in part.parameters()), "something was read"
    return str(caught.value)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Write all tensors anew, changed, as one file."""
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def first_shard(folder: Path) -> Path:
    return folder / sorted(file.name for file in folder.glob("*.safetensors"))[0]


def test_missing_unexpected_and_misshapen_at_once(part: nn.Module, folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name or ".layers.1.m" in name]:
            del tensors[name]
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["extra.weight"] = torch.ones(2)

    message = refused(part, change_tensors(folder, change))
    lacks, has, shape = message.splitlines()
    assert "lacks 12 tensors: model.layers.0.self_attn.q_proj.weight, " in lacks
    assert " and 2 more (if that is meant to be so, pass allow_missing=True)" in lacks
    assert lacks.count("model.layers.") == 10
    assert "has, and the model has not, 1 tensor: extra.weight (if" in has
    assert "has in another shape 1 tensor: model.norm.weight ([31] instead of [32])" in shape
    message = refused(part, folder, allow_missing=True, allow_unexpected=True)
    assert "lacks" not in message
    assert "[31]" in message


def test_experts_that_do_not_fit_together(tiny: Tiny, tmp_path: Path) -> None:
    def make() -> PreTrainedModel:
        return tiny("qwen3_moe", 2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)

    make().save_pretrained(tmp_path)
    layers = "model.layers.{}.mlp.experts.{}.{}_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[layers.format(0, 3, "up")]
        tensors[layers.format(1, 2, "down")] = torch.ones(32, 20)

    change_tensors(tmp_path, change)
    with init_empty_weights():
        model = make()
    layout = find_layout(model)
    part, _ = split_model_into_stages(model, plan_stage_fqns(layout, (1, 1)), [0, 1], layout)
    message = refused(part, tmp_path)
    assert "another shape 2 tensors: model.layers.0.mlp.experts.gate_up_proj (cannot" in message
    assert "model.layers.1.mlp.experts.down_proj (cannot be made of 4 tensors: " in message


def truncated(folder: Path) -> None:
    file = first_shard(folder)
    os.truncate(file, file.stat().st_size - 5)


def rewritten_header(change: Callable[[bytes], bytes]) -> Change:
    def rewrite(folder: Path) -> None:
        file = first_shard(folder)
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        file.write_bytes(change(raw[:8] + raw[8 : 8 + length]) + raw[8 + length :])

    return rewrite


def without_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def name_in_two_files(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)


def only_pickles(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def other_index(text: str) -> Change:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (truncated, ("is cut off: it has", "-00001-of-")),
        (rewritten_header(lambda h: b"PK\x03\x04" + h[4:]), ("no safetensors file, or cut off",)),
        (rewritten_header(lambda h: (10**7).to_bytes(8, "little") + h[8:]), ("cut off in its",)),
        (rewritten_header(lambda h: h[:8] + b"?" * (len(h) - 8)), ("a header that is no JSON",)),
        (rewritten_header(lambda h: h[:8] + b"[]".ljust(len(h) - 8)), ("a header that is none",)),
        (
            rewritten_header(lambda h: h.replace(b'"data_offsets":', b'"data_offsetz":')),
            ("a header that is none: KeyError('data_offsets')",),
        ),
        (rewritten_header(lambda h: h.replace(b'"F32"', b'"F4" ')), ("dtype F4, which is not",)),
        (rewritten_header(lambda h: h.replace(b"[64,32]", b"[64,31]")), ("shape [64, 31] and 8192",)),
        (without_shard, ("lacks 1 of the", "model-00001-of-")),
        (other_index("{"), ("is no index of a checkpoint",)),
        (other_index('{"weight_map": ["a"]}'), ("is no index of a checkpoint",)),
        (name_in_two_files, ("is in model-00001-of-", "and in model-00002-of-")),
        (only_pickles, ("pytorch_model*.bin", "save it again with save_pretrained")),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], ("has neither model",)),
    ],
)  # fmt: skip
def test_files_that_are_wrong(
    change: Change, said: tuple[str, ...], part: nn.Module, folder: Path
) -> None:
    change(folder)
    message = refused(part, folder)
    for each in said:
        assert each in message


def test_every_file_that_is_cut_off_is_listed(part: nn.Module, folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        os.truncate(file, 100)
    message = refused(part, folder)
    assert all(file.name in message for file in files)


def test_a_quantized_checkpoint(tiny: Tiny, folder: Path) -> None:
    with init_empty_weights():
        model = tiny("llama", 3, quantization_config={"quant_method": "fp8"})
    layout = find_layout(model)
    [part] = split_model_into_stages(model, plan_stage_fqns(layout, (1, 2)), [1], layout)
    assert "is quantized (quantization_config in its config)" in refused(part, folder)


def test_a_whole_model(tiny: Tiny, folder: Path) -> None:
    with pytest.raises(TypeError, match="is no stage's module: make it with split_model_into"):
        load_stage_weights(tiny("llama", 3), folder, "cpu")


@pytest.mark.parametrize("path", ["/no/such/folder", "./no", "../a/b/c"])
def test_no_such_path(path: str, part: nn.Module) -> None:
    assert f"{path} is no folder and no file" in refused(part, path)


def hub_folder(cache: Path, files: Path, names: list[str]) -> Path:
    """Lay out a cache of the hub as downloads do, with some of the files."""
    repo = cache / "models--some-org--tiny-llama"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    (repo / "blobs").mkdir()
    for number, name in enumerate(names):
        blob = repo / "blobs" / f"{number:040x}"
        blob.write_bytes((files / name).read_bytes())
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that is all there is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_model_in_the_cache_of_the_hub(part: nn.Module, folder: Path, cache: Path) -> None:
    snapshot = hub_folder(cache, folder, [file.name for file in folder.iterdir()])
    assert resolve_checkpoint("some-org/tiny-llama") == snapshot
    load_stage_weights(part, "some-org/tiny-llama", "cpu")
    assert all(p.device.type == "cpu" for p in part.parameters())


def test_a_model_that_is_in_the_cache_in_part(part: nn.Module, folder: Path, cache: Path) -> None:
    names = ["config.json", "model.safetensors.index.json", first_shard(folder).name]
    hub_folder(cache, folder, names)
    number = len(list(folder.glob("*.safetensors")))
    assert f"lacks {number - 1} of the {number} files" in refused(part, "some-org/tiny-llama")


def test_a_model_that_cannot_be_fetched(part: nn.Module, cache: Path) -> None:
    began = time.monotonic()
    message = refused(part, "some-org/none-such")
    assert "some-org/none-such is neither a folder nor whole in this machine's cache" in message
    assert "cannot be fetched: " in message
    assert time.monotonic() - began < 10
