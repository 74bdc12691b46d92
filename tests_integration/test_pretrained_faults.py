"""What goes wrong on one rank is said on all of them, and a checkpoint that was there stays."""

import os
import resource
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, RanksFailed
from oracle import build
from safetensors.torch import load_file, save_file
from test_pretrained import TIED, EmptyCase, equal, read, sharded_pipeline
from tiny_models import tiny_model

LIMIT = 30
CASE = EmptyCase("llama", "1f1b", (1, 2), dtype=torch.float32)
OTHER = {"initializer_range": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoint `source`, in several files."""
    tiny_model("llama", 3, torch.float32).save_pretrained(
        tmp_path / "source", max_shard_size="20KB"
    )
    return tmp_path


def load_only(paths: list[str]) -> None:
    """Load; each rank from its own path."""
    ap = build(CASE)
    ap.load_pretrained(paths[dist.get_rank()])


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "source").glob("*.safetensors"))


@pytest.mark.parametrize("fault", ["missing", "cut off", "absent"])
def test_the_same_error_on_every_rank(ranks: RankPool, folder: Path, fault: str) -> None:
    last = shards(folder)[-1]
    if fault == "missing":
        tensors = load_file(last)
        names = sorted(tensors)
        save_file({"new.weight": torch.ones(1)}, last)
        said = [f"lacks {len(names)} tensor", *names, "has, and the model has not, 1 tensor: new"]
    elif fault == "cut off":
        os.truncate(last, last.stat().st_size - 1)
        said = [last.name, "is cut off"]
    else:
        last.unlink()
        said = [f"lacks 1 of the {len(shards(folder)) + 1} files", last.name]
    path = str(folder / "source")
    first, second = ranks.run_expecting_error(2, load_only, [path, path], timeout=LIMIT)
    assert first == second
    assert first[0] == "CheckpointError"
    assert first[1].startswith(f"cannot load {path}:\n  {path}")  # not once per rank
    for each in said:
        assert each in first[1]


def test_a_file_that_is_broken_for_one_rank_alone(ranks: RankPool, folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    for file in (folder / "source").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    os.truncate(other / shards(folder)[0].name, 100)
    paths = [str(folder / "source"), str(other)]
    for name, message in ranks.run_expecting_error(2, load_only, paths, timeout=LIMIT):
        assert name == "CheckpointError"
        assert "rank 1: " in message
        assert "rank 0" not in message
        assert "is cut off" in message or "no safetensors file" in message


def save_failing(folder: str, failing_rank: int, fault: str) -> None:
    """Load, and save to where one rank cannot write."""
    ap = build(CASE)
    ap.load_pretrained(Path(folder, "source"))
    if dist.get_rank() == failing_rank:
        if fault == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        elif fault == "meta":
            ap.parts[0].get_submodule("model.layers.1").to("meta")
    ap.save_pretrained(Path(folder, "no", "file", "saved") if fault == "way" else f"{folder}/saved")


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize(
    ("rank", "fault", "said"),
    [
        (0, "size", "rank 0: "),
        (1, "size", "rank 1: "),
        (1, "meta", "rank 1: ValueError: the stages have parameters without values"),
        (0, "way", "rank 0: NotADirectoryError"),
    ],
)
def test_all_raise_if_one_cannot_write(
    ranks: RankPool, folder: Path, rank: int, fault: str, said: str, there_before: bool
) -> None:
    before = tiny_model("llama", 3, torch.float32, **OTHER)
    if there_before:
        before.save_pretrained(folder / "saved")
    (folder / "no").mkdir()
    (folder / "no" / "file").touch()
    for name, message in ranks.run_expecting_error(
        2, save_failing, str(folder), rank, fault, timeout=LIMIT
    ):
        assert name == "RuntimeError"
        assert "could not be written:\n  " in message
        assert said in message
    assert not (folder / ".saved.partial").exists()
    if there_before:
        equal([read(type(before), folder / "saved").state_dict()], before.state_dict())
    else:
        assert not (folder / "saved").exists()


def save_sharded(folder: str) -> None:
    """Save shards that two ranks bring together, one of which cannot write."""
    ap = sharded_pipeline()
    ap.load_pretrained(Path(folder, "source"))
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    ap.save_pretrained(Path(folder, "saved"), max_shard_size=20_000)


def test_a_rank_that_cannot_write_goes_on_to_help(ranks: RankPool, tmp_path: Path) -> None:
    model = tiny_model("llama", 3, torch.float32, **TIED, vocab_size=63)
    model.save_pretrained(tmp_path / "source")
    for name, message in ranks.run_expecting_error(4, save_sharded, str(tmp_path), timeout=60):
        assert name == "RuntimeError"
        assert "could not be written:\n  rank 2: " in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def save_killed(folder: str, rank: int, fatal: int) -> list[str]:
    """Save; `rank` kills itself at the `fatal`th thing it does to a file of the checkpoint.

    Returns:
        All that this rank does to them.
    """
    ap = build(CASE)
    ap.load_pretrained(Path(folder, "source"))
    seen: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        what = f"{event} {arguments}"
        if event.startswith(("open", "os.", "shutil.", "ctypes.dlsym")) and (
            "saved" in what or "renameat2" in what
        ):
            seen.append(what)
            if len(seen) == fatal and dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)  # for good: such a worker must not serve another test
    ap.save_pretrained(Path(folder, "saved"), max_shard_size=30_000)
    return seen


def run_once(folder: Path, rank: int, fatal: int) -> list[list[str]]:
    """Save in processes that nobody uses afterwards."""
    with closing(RankPool(grace=15)) as pool:
        return pool.run(2, save_killed, str(folder), rank, fatal, timeout=LIMIT)


def test_a_rank_that_is_killed(folder: Path) -> None:
    before = tiny_model("llama", 3, torch.float32, **OTHER)
    new = read(type(before), folder / "source")
    before.save_pretrained(folder / "saved")
    events = run_once(folder, -1, 0)
    exchange = next(i for i, each in enumerate(events[0], 1) if "renameat2" in each)
    number = len(events[0])
    assert exchange < number
    moments = [(1, len(events[1]) // 2), *((0, at) for at in (number // 3, exchange, number))]
    outcomes = []
    for rank, fatal in moments:
        before.save_pretrained(folder / "saved")
        with pytest.raises(RanksFailed) as caught:
            run_once(folder, rank, fatal)
        states = {report.rank: report.state for report in caught.value.reports}
        assert states == {rank: "died", 1 - rank: "raised"}
        found = read(type(before), folder / "saved").state_dict()
        is_new = torch.equal(found["lm_head.weight"], new.state_dict()["lm_head.weight"])
        equal([found], (new if is_new else before).state_dict())
        outcomes.append(is_new)
    assert outcomes == [False, False, False, True]
    # What was left aside is in nobody's way.
    assert (folder / ".saved.partial").exists()
    run_once(folder, -1, 0)
    assert not (folder / ".saved.partial").exists()
    equal([read(type(before), folder / "saved").state_dict()], new.state_dict())
