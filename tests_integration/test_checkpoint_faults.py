"""A save that a rank does not survive, or that has no room, leaves the checkpoints that were there.

Ranks are killed (SIGKILL) just before one of their calls to the operating system, or by a timer:

- `publish`, which one rank runs once all have written, before each of its calls: flushing each file
  and the folder, giving the folder its name, writing, flushing and naming the marker, the same of
  `latest`, setting the old checkpoint aside, removing each of its files and the folder. The same
  for a checkpoint that replaces one of the same step.
- A save by two ranks, from start to end. Rank 0 before each of these calls: looking for leftovers,
  making the folder, opening and flushing its data, opening, flushing and naming torch's metadata,
  and those of `publish`. Rank 1: making the folder, opening and flushing its data. In the
  background too, with each fourth of rank 0's calls.
- Either rank at random times of a save, and of one in the background while training goes on.

Each time a fresh process loads what is there on one rank, trains on to the losses of a run without
faults, and saves.
"""

import errno
import importlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from oracle import Case
from test_resume import make, schedule, train
from torch import nn

from pp_autopipeline.checkpoint_folder import CheckpointFolder, is_complete
from pp_autopipeline.checkpoints import Checkpoints

CALLS = ("io.open", "os.open", "os.fsync", "os.mkdir", "os.rename", "os.replace", "os.unlink")
CALLS = (*CALLS, "os.rmdir")
TWO = Case("llama", "1f1b", (1, 1))
ONE = Case("llama", "1f1b", (2,))
TOTAL = 5


@contextmanager
def watched(before: Callable[[str], None]) -> Iterator[None]:
    """Call `before` with the name of each call that changes, or may change, what is on disk."""
    modules = {"io": io, "os": os}
    originals = {}
    for name in CALLS:
        module, function = modules[name.split(".")[0]], name.split(".")[1]
        original = originals[name] = getattr(module, function)

        def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            before(_name)
            return _original(*args, **kwargs)

        setattr(module, function, call)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(modules[name.split(".")[0]], name.split(".")[1], original)


class At:
    """Does something before a call: the `number`-th of all, or of those of one name."""

    def __init__(self, action: Callable[[], None], number: int, name: str = "") -> None:
        self.action, self.number, self.name = action, number, name
        self.seen: list[str] = []

    def __call__(self, name: str) -> None:
        if not self.name or name == self.name:
            self.seen.append(name)
            if len(self.seen) == self.number:
                self.action()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def written(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_text(text)


def prepare(path: Path, step: int) -> CheckpointFolder:
    """A folder with a checkpoint of step 1, and one of the given step that is to be published."""
    shutil.rmtree(path, ignore_errors=True)
    folder = CheckpointFolder(path, keep_last=1, keep_every=None)
    written(folder.partial(1), "old")
    folder.publish(1, num_files=2)
    written(folder.partial(step), "new")
    return folder


def contents(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.iterdir() if path.name != "complete.json"}


def check(path: Path, step: int) -> None:
    """What is there is whole, can be found, and does not keep the next save from working."""
    folder = CheckpointFolder(path, keep_last=1, keep_every=None)
    found = folder.latest()
    assert found is not None
    for number in folder.steps():
        assert contents(folder.of(number)) in ({"old"}, {"new"})
        assert number == step or contents(folder.of(number)) == {"old"}
    folder.remove_leftovers()
    assert folder.latest() == found
    written(folder.partial(9), "next")
    folder.publish(9, num_files=2)
    assert folder.steps() == [9]
    assert sorted(os.listdir(path)) == ["latest", "step-00000009"]


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing takes most of the time, and changes nothing for a process that is killed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize("step", [2, 1], ids=["new", "replacing"])
def test_killed_before_every_call_of_publish(tmp_path: Path, step: int) -> None:
    path = tmp_path / "checkpoints"
    seen = At(kill, 0)
    folder = prepare(path, step)
    with watched(seen):
        folder.publish(step, num_files=2)
    assert len(seen.seen) > 30
    kept = []
    for number in range(1, len(seen.seen) + 1):
        folder = prepare(path, step)
        if (child := os.fork()) == 0:
            with watched(At(kill, number)):
                folder.publish(step, num_files=2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        latest = folder.latest()
        assert latest is not None
        kept.append(contents(folder.of(latest)).pop())
        check(path, step)
    assert kept == sorted(kept, reverse=True)  # the old one, then the new one
    assert set(kept) == {"old", "new"}


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize("step", [2, 1], ids=["new", "replacing"])
def test_full_before_every_call_of_publish(tmp_path: Path, step: int) -> None:
    path, number, failed = tmp_path / "checkpoints", 0, True
    while failed or number < 30:
        number += 1
        folder = prepare(path, step)
        at = At(full, number)
        try:
            with watched(at):
                folder.publish(step, num_files=2)
            failed = len(at.seen) >= number  # to remove an old one is not a must
        except OSError:
            folder.discard(step)
            assert folder.latest() == 1
            assert folder.steps() == [1]
            if step != 1:
                assert contents(folder.of(1)) == {"old"}
            assert not folder.partial(step).exists()
        check(path, step)


def test_a_rank_without_the_shared_folder_is_noticed(tmp_path: Path) -> None:
    folder = prepare(tmp_path, 2)
    with pytest.raises(OSError, match=r"2 of 3 files are in .* all ranks share"):
        folder.publish(2, num_files=3)
    assert not is_complete(folder.of(2))


class Job:
    """What a rank trains: its part of a pipeline, or layers of its own, of two on two ranks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "pipeline":
            self.pipeline, self.optimizer, self.scheduler = make(
                TWO if dist.get_world_size() == 2 else ONE
            )
            return
        self.layers = nn.ModuleDict()
        for number in (0, 1) if dist.get_world_size() == 1 else (dist.get_rank(),):
            torch.manual_seed(number)
            self.layers[f"layer{number}"] = nn.Linear(4, 4)
        self.pipeline = [self.layers]
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.1)
        self.scheduler = schedule(self.optimizer)

    def train(self, start: int, end: int) -> list[list[float]]:
        """Return the losses of each step."""
        if self.kind == "pipeline":
            loss = train(self.pipeline, self.optimizer, self.scheduler, start, end)
            return [[value] for value in loss]
        losses = []
        for step in range(start, end):
            x = torch.rand(3, 4, generator=torch.Generator().manual_seed(step))
            each = [layer(x).square().mean() for layer in self.layers.values()]
            torch.stack(each).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append([loss.item() for loss in each])
        return losses

    @property
    def saved(self) -> tuple[Any, Any, Any]:
        return self.pipeline, self.optimizer, self.scheduler


def first_step(folder: str, kind: str) -> list[list[float]]:
    """Losses without any fault; the first step is saved."""
    job = Job(kind)
    losses = job.train(0, 1)
    Checkpoints(folder).save(1, *job.saved, data="old")
    return losses + job.train(1, TOTAL)


def second_step(folder: str, kind: str, asynchronous: bool, before: Callable[[str], None]) -> None:
    """Go on from the first step and save the second."""
    job, checkpoints = Job(kind), Checkpoints(folder, keep_last=1)
    checkpoints.load(*job.saved)
    job.train(1, 2)
    dist.barrier()
    with watched(before):
        checkpoints.save(2, *job.saved, "new", asynchronous=asynchronous)
        if asynchronous:
            job.train(2, 4)
        checkpoints.wait()


def calls_of_a_save(folder: str, kind: str, asynchronous: bool) -> list[str]:
    at = At(lambda: None, 0)
    second_step(folder, kind, asynchronous, at)
    return at.seen


def resume(folder: str, kind: str) -> tuple[int, list[list[float]]]:
    """What a fresh process finds, and how it goes on; what was left over goes with its save."""
    job, checkpoints = Job(kind), Checkpoints(folder, keep_last=1)
    resumed = checkpoints.load(*job.saved)
    assert resumed.data == {1: "old", 2: "new"}[resumed.step]
    losses = job.train(resumed.step, TOTAL)
    checkpoints.save(TOTAL, *job.saved)
    assert sorted(os.listdir(folder)) == ["latest", f"step-{TOTAL:08d}"]
    return resumed.step, losses


@dataclass(frozen=True)
class Death:
    """When one of two ranks is killed."""

    kind: str
    rank: int
    number: int = 0
    """Before this call, counted from the start of the save."""
    delay: float = 0.0
    """Else so many seconds after its start."""
    asynchronous: bool = False


def nursery(rank: int, pipe: Connection) -> None:
    """Fork one process after the other to be a rank, which may be killed."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    while True:
        try:
            folder, store, death = pipe.recv()
        except EOFError:
            return
        if (child := os.fork()) == 0:
            try:
                be_rank(rank, folder, store, death)
            except BaseException:
                os._exit(1)  # the other rank is gone
            os._exit(0)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def be_rank(rank: int, folder: str, store: str, death: Death) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit
    )
    at = At(kill if rank == death.rank else lambda: None, death.number)

    def before(call: str) -> None:
        if not at.seen and death.delay and rank == death.rank:
            threading.Timer(death.delay, kill).start()
        at(call)

    second_step(folder, death.kind, death.asynchronous, before)


class Mortals:
    """Two ranks that are killed again and again, and one that looks at what they leave."""

    def __init__(self, folder: Path) -> None:
        self.observer = RankPool()
        self.folder = folder
        self.losses: dict[str, list[list[float]]] = {}
        for kind in ("layers", "pipeline"):
            ranks = self.observer.run(2, first_step, str(folder / kind), kind)
            together = [first + second for first, second in zip(*ranks, strict=True)]
            self.losses[kind] = together if kind == "layers" else ranks[0]
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(2)]
        self.pipes = [ours for ours, _ in pairs]
        self.nurseries = [
            context.Process(target=nursery, args=(rank, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.nurseries:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self.count = 0

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.nurseries, strict=True):
            pipe.close()
            process.join(10)
        self.observer.close()

    def copy(self, kind: str) -> str:
        """The start again, in a folder of its own."""
        self.count += 1
        copy = self.folder / str(self.count)
        shutil.copytree(self.folder / kind, copy)
        return str(copy)

    def die(self, death: Death) -> int:
        """Have a rank killed; return the step from which training was then resumed, rightly."""
        folder = self.copy(death.kind)
        for pipe in self.pipes:
            pipe.send((folder, f"{folder}.store", death))
        codes = []
        for pipe in self.pipes:
            assert pipe.poll(40), "a rank hangs"
            codes.append(pipe.recv())
        if not death.delay:
            assert codes[death.rank] == -signal.SIGKILL
        assert codes[1 - death.rank] in (0, 1)
        [(step, losses)] = self.observer.run(1, resume, folder, death.kind)
        for got, wanted in zip(losses, self.losses[death.kind][step:], strict=True):
            assert got == pytest.approx(wanted, rel=1e-6), death
        return step


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortals]:
    mortals = Mortals(tmp_path_factory.mktemp("mortals"))
    yield mortals
    mortals.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_before_calls_of_a_save(mortals: Mortals, asynchronous: bool) -> None:
    folder = mortals.copy("layers")
    calls = mortals.observer.run(2, calls_of_a_save, folder, "layers", asynchronous)
    found: dict[int, list[int]] = {}
    for rank, seen in enumerate(calls):
        assert {"os.mkdir", "io.open", "os.fsync"} <= set(seen)
        numbers = [n for n, call in enumerate(seen, 1) if call != "os.open"]
        for number in numbers[:: 4 if asynchronous and rank == 0 else 1]:
            death = Death("layers", rank, number, asynchronous=asynchronous)
            found.setdefault(rank, []).append(mortals.die(death))
    assert found[0] == sorted(found[0])
    assert set(found[0]) == {1, 2}
    assert set(found[1]) == {1}  # all of its calls come before anything is published


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_any_time(mortals: Mortals, asynchronous: bool) -> None:
    times = random.Random(3)
    for number in range(8):
        delay = times.uniform(0.001, 0.1)
        mortals.die(Death("layers", number % 2, delay=delay, asynchronous=asynchronous))
    mortals.die(Death("pipeline", 1, delay=times.uniform(0.001, 0.1), asynchronous=asynchronous))
    mortals.die(Death("pipeline", 0, times.randint(8, 30), asynchronous=asynchronous))


def limited_save(folder: str, asynchronous: bool) -> tuple[str, float]:
    """One rank may write no large file: what is said, and after how long."""
    job, checkpoints = Job("layers"), Checkpoints(folder)
    checkpoints.save(1, *job.saved)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        checkpoints.save(2, *job.saved, asynchronous=asynchronous)
        checkpoints.wait()
    seconds = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert checkpoints.latest() == 1
    assert sorted(os.listdir(folder)) == ["latest", "step-00000001"]
    checkpoints.wait()  # the error is told once
    checkpoints.save(3, *job.saved, asynchronous=asynchronous)
    assert checkpoints.load(*job.saved).step == 3
    return str(caught.value), seconds


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    (first, seconds), (second, _) = ranks.run(2, limited_save, str(tmp_path), asynchronous)
    assert first == second
    assert "step-00000002 could not be saved" in first
    assert "rank 1: OSError: [Errno 27] File too large" in first
    assert seconds < 10


def filled_disk(folder: str) -> list[str]:
    """Save until there is no room, then make room."""
    torch.manual_seed(dist.get_rank())
    layers = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(200, 200)})
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    said = []
    for asynchronous in (False, True):
        checkpoints = Checkpoints(folder)
        with pytest.raises(RuntimeError) as caught:  # noqa: PT012
            for step in range(1, 20):
                with checkpoints:
                    checkpoints.save(step, [layers], optimizer, asynchronous=asynchronous)
        said.append(str(caught.value))
        dist.barrier()
        assert checkpoints.load([layers], optimizer).step == checkpoints.steps()[-1]
        assert len(os.listdir(folder)) == 1 + len(checkpoints.steps())
        dist.barrier()
        if dist.get_rank() == 0:
            for step in checkpoints.steps()[1:]:
                shutil.rmtree(Path(folder, f"step-{step:08d}"))
        dist.barrier()
    return said


def test_a_full_disk(ranks: RankPool, tmp_path: Path) -> None:
    options = ["-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        first, second = ranks.run(2, filled_disk, str(tmp_path))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert first == second
    assert all("No space left on device" in message for message in first), first


def damaged(folder: str, name: str) -> None:
    job, checkpoints = Job("layers"), Checkpoints(folder)
    checkpoints.save(1, *job.saved)
    if dist.get_rank() == 0:
        file = Path(folder, "step-00000001", name)
        file.write_bytes(b"\0" * file.stat().st_size)  # of the right length
    dist.barrier()
    checkpoints.load(*job.saved)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_damaged_file(ranks: RankPool, tmp_path: Path, name: str) -> None:
    first, second = ranks.run_expecting_error(2, damaged, str(tmp_path), name)
    assert first == second
    assert first[0] == "RuntimeError"
    assert "cannot be read" in first[1]
