"""A checkpoint is complete or absent, and the one that was there before outlives every failure."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pp_split_hf import (
    find_layout,
    plan_stage_fqns,
    save_pretrained_pipeline,
    split_model_into_stages,
)
from pp_split_hf.publish import publish_folder, restore_folder

Tiny = Callable[..., PreTrainedModel]


def save(model: PreTrainedModel, path: Path, size: int = 30_000) -> None:
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, (1, 2))
    parts = split_model_into_stages(model, plan, [0, 1], layout)
    save_pretrained_pipeline(parts, path, max_shard_size=size)


def holds(path: Path, model: PreTrainedModel) -> bool:
    found = AutoModelForCausalLM.from_pretrained(path).state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 500, 5_000])
def test_a_file_that_cannot_be_written_whole(size: int, tiny: Tiny, tmp_path: Path) -> None:
    old, new = tiny("llama", 3, initializer_range=0.5), tiny("llama", 3)
    save(old, tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "other"):
        with (
            pytest.raises(RuntimeError, match="could not be written"),
            file_size_limit(size),
        ):
            save(new, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert holds(tmp_path / "saved", old)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full(small_disk: Path, tiny: Tiny) -> None:
    old, new = tiny("llama", 3, initializer_range=0.5), tiny("llama", 3)
    save(old, small_disk / "saved")
    filler = small_disk / "filler"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    filler.write_bytes(b"\0" * (free - 80_000))
    with pytest.raises(RuntimeError, match="No space left on device"):
        save(new, small_disk / "saved")
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["filler", "saved"]
    assert holds(small_disk / "saved", old)
    filler.unlink()
    save(new, small_disk / "saved")
    assert holds(small_disk / "saved", new)


def test_a_file_is_in_the_way(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama", 3)
    (tmp_path / ".saved.partial").touch()
    with pytest.raises(RuntimeError, match="FileExistsError"):
        save(model, tmp_path / "saved")
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="NotADirectoryError"):
        save(model, tmp_path / "file" / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_a_killed_save_left_is_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    old, new = tiny("llama", 3, initializer_range=0.5), tiny("llama", 3)
    save(old, tmp_path / "saved")
    left = tmp_path / ".saved.partial"
    left.mkdir()
    (left / "model-00009-of-00009.safetensors").write_bytes(b"half")
    save(new, tmp_path / "saved")
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert holds(tmp_path / "saved", new)
    assert not (tmp_path / "saved" / "model-00009-of-00009.safetensors").exists()


def test_files_of_the_one_before_are_gone(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama", 3)
    save(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    save(model, tmp_path / "saved", 5_000_000)
    names = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for content in ("first", "second"):
        new = tmp_path / "new"
        (new / "inner").mkdir(parents=True)
        (new / "inner" / "file").write_text(content)
        publish_folder(new, tmp_path / "final")
        assert [entry.name for entry in tmp_path.iterdir()] == ["final"]
        assert (tmp_path / "final" / "inner" / "file").read_text() == content


KILLED = """
import os, signal, sys
from pathlib import Path
from pp_split_hf import publish

publish._exchange = lambda first, second: False  # as on file systems that cannot
renames, rename = [], Path.rename


def dying(self, target):
    renames.append(target)
    if len(renames) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)


Path.rename = dying
publish.publish_folder(Path(sys.argv[1], "new"), Path(sys.argv[1], "final"))
"""


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    for name in ("new", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "final").exists()
    for _ in range(2):  # once is enough, and twice does no harm
        restore_folder(tmp_path / "final")
        assert (tmp_path / "final/content").read_text() == "final"
    publish_folder(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final/content").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]


def test_a_save_finds_the_checkpoint_that_was_set_aside(tiny: Tiny, tmp_path: Path) -> None:
    first, second = tiny("llama", 3), tiny("llama", 3)
    save(first, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    with file_size_limit(1000), pytest.raises(RuntimeError, match="could not be written"):
        save(second, tmp_path / "model")
    assert holds(tmp_path / "model", first)


def test_what_else_is_in_the_folder_stays(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny("llama", 3).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    (path / "README.md").write_text("about it")
    (path / "runs/1").mkdir(parents=True)
    (path / "runs/1/log").write_text("a line")
    (path / "runs/latest").symlink_to("1")
    second = tiny("llama", 3)
    save(second, path, size=10**9)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    assert (path / "README.md").read_text() == "about it"
    assert (path / "runs/latest/log").read_text() == "a line"
    assert holds(path, second)
