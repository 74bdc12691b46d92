"""Runs a function on several ranks, in worker processes that are kept for the next test.

A fork server imports torch and Transformers once; workers are forked from it when a test
first needs them and then serve one call after another, so a call costs milliseconds.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rank_worker import READY, RELEASE, serve

_PRELOAD = [
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers",
    "transformers.modeling_utils",
]
# What gloo says on a rank whose peer went away: a consequence, never the cause.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass
class RankReport:
    """How one rank's call ended; `state` is returned, raised, died or unfinished."""

    rank: int
    state: str
    value: Any = None
    type_name: str = ""
    message: str = ""
    details: str = ""
    when: float = 0.0

    def _order(self) -> tuple[int, float]:
        if self.state == "raised" and any(phrase in self.message for phrase in _PEER_GONE):
            return 2, self.when
        return {"raised": 0, "died": 0, "unfinished": 1, "returned": 3}[self.state], self.when

    def __str__(self) -> str:
        group, _ = self._order()
        if self.state == "returned":
            return f"rank {self.rank} returned"
        if self.state == "raised":
            after = " (a peer had gone)" if group == 2 else ""
            head = f"rank {self.rank} raised {self.type_name}{after}: {self.message}"
        else:
            head = f"rank {self.rank} {self.message}"
        return head + "\n" + textwrap.indent(self.details.rstrip(), "    ")


class RanksFailed(RuntimeError):  # noqa: N818
    """At least one rank did not return; the message tells each rank's end, the cause first."""

    def __init__(self, headline: str, reports: list[RankReport]):
        self.reports = reports
        ordered = sorted(reports, key=RankReport._order)
        super().__init__("\n".join([headline, *map(str, ordered)]))


class _Worker:
    """One process of the pool, as the pool sees it."""

    def __init__(self, folder: Path, number: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.stack_file = folder / f"worker-{number}.stack"
        self.log_file = folder / f"worker-{number}.log"
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        # Not daemonic: a tested function may start data-loader processes of its own.
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, str(self.stack_file), str(self.log_file))
        )
        self.process.start()
        theirs.close()

    def receive(self, rank: int) -> RankReport:
        """Reads the report that has arrived, or tells how the process died."""
        try:
            if self.pipe.poll():
                return RankReport(rank, **pickle.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            pass
        self.process.join(5)
        code = self.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        said = _tail(self.log_file) + _tail(self.stack_file)
        return RankReport(rank, "died", message=f"died: {how}", details=said, when=time.monotonic())

    def dump_stack(self) -> str:
        """Returns the Python stack of every thread of the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        size, deadline = -1, time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.05)
            last, size = size, self.stack_file.stat().st_size
            if size > 0 and size == last:
                break
        return _tail(self.stack_file) or "(no stack: the process did not answer)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RankPool:
    """Processes that play the ranks of a job, one call after another.

    Args:
        grace: Seconds that the other ranks get to end by themselves after the first failure.
    """

    def __init__(self, grace: float = 5.0):
        self._grace = grace
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        atexit.register(self.close)

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60
    ) -> list[Any]:
        """Calls `function(*args)` on every rank of a fresh gloo world.

        Args:
            world_size: How many ranks.
            function: A module-level function; it finds the default process group initialised.
            args: Arguments, the same on every rank; pickled.
            timeout: Seconds until the ranks are stopped; starting workers does not count.

        Returns:
            What each rank returned, in rank order; tensors come back as copies.

        Raises:
            RanksFailed: A rank raised, died, or had not finished in time. The workers are
                thrown away; the next call starts new ones.
        """
        __tracebackhide__ = True
        reports = self._call(world_size, function, args, timeout)
        if all(report.state == "returned" for report in reports):
            return [report.value for report in reports]
        raise RanksFailed(_headline(function, reports, timeout), reports)

    def run_expecting_error(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60
    ) -> list[tuple[str, str]]:
        """Like `run`, for a call that every rank must refuse.

        Returns:
            Exception type name and message of each rank, in rank order.

        Raises:
            RanksFailed: A rank did something else than raise; what it returned is shown.
        """
        __tracebackhide__ = True
        reports = self._call(world_size, function, args, timeout)
        if all(report.state == "raised" for report in reports):
            return [(report.type_name, report.message) for report in reports]
        returned = {r.rank: r.value for r in reports if r.state == "returned"}
        headline = f"every rank was to raise; returned instead (by rank): {returned}\n"
        raise RanksFailed(headline + _headline(function, reports, timeout), reports)

    def close(self) -> None:
        """Ends the workers and removes the pool's files; closing twice is fine."""
        self._discard()
        if os.path.isdir(self._folder.name):
            self._folder.cleanup()
        atexit.unregister(self.close)

    def _call(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[RankReport]:
        target = _reference(function)
        self._start(world_size)
        workers = self._workers[:world_size]
        # One store file a call, all in the pool's folder: torch's FileStore touches its file
        # again when it is destroyed, so the file must outlive the call.
        store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        packed = pickle.dumps(args)
        try:
            for rank, worker in enumerate(workers):
                job = (*target, packed, store, rank, world_size, timeout)
                worker.pipe.send_bytes(pickle.dumps(job))
            reports = self._collect(workers, timeout)
        except BaseException:
            self._discard()
            raise
        if all(report.state == "returned" for report in reports):
            for worker in workers:
                worker.pipe.send_bytes(RELEASE)
        else:
            self._discard()
        return reports

    def _start(self, world_size: int) -> None:
        if not os.path.isdir(self._folder.name):
            raise RuntimeError("the pool is closed; make a new RankPool")
        if not all(worker.process.is_alive() for worker in self._workers):
            self._discard()
        new = [
            _Worker(Path(self._folder.name), next(self._numbers))
            for _ in range(world_size - len(self._workers))
        ]
        self._workers += new
        for worker in new:
            # The first worker of a session waits for the fork server's imports.
            if not worker.pipe.poll(300) or worker.pipe.recv_bytes() != READY:
                self._discard()
                raise RuntimeError("a worker process did not start within 300 s")

    def _collect(self, workers: list[_Worker], timeout: float) -> list[RankReport]:
        reports: dict[int, RankReport] = {}
        deadline = time.monotonic() + timeout
        while len(reports) < len(workers):
            sources: dict[Any, int] = {}
            for rank, worker in enumerate(workers):
                if rank not in reports:
                    sources |= {worker.pipe: rank, worker.process.sentinel: rank}
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {sources[source] for source in ready}:
                reports[rank] = workers[rank].receive(rank)
                if reports[rank].state != "returned":
                    deadline = min(deadline, time.monotonic() + self._grace)
        for rank, worker in enumerate(workers):
            if rank not in reports:
                stack = worker.dump_stack()
                reports[rank] = RankReport(
                    rank, "unfinished", message="had not finished; its stack:", details=stack
                )
        return [reports[rank] for rank in range(len(workers))]

    def _discard(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []


def _headline(function: Callable[..., Any], reports: list[RankReport], timeout: float) -> str:
    bad = [r.rank for r in reports if r.state in ("raised", "died")]
    late = [r.rank for r in reports if r.state == "unfinished"]
    parts = [f"failed: ranks {bad}"] if bad else []
    if late:
        limit = "soon after the first failure" if bad else f"within {timeout:g} s"
        parts.append(f"not finished {limit}: ranks {late}")
    return f"{function.__qualname__} on {len(reports)} ranks: {'; '.join(parts)}"


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


def _reference(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    name, qualname = function.__module__, function.__qualname__
    if "<" in qualname:
        raise TypeError(f"{qualname} must be a module-level function: workers import it by name")
    return name, getattr(sys.modules.get(name), "__file__", None), qualname
