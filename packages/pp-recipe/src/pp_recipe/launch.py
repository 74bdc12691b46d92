"""Starts the ranks on this machine, ends them together, and tells which one failed."""

import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pp_recipe.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class InterruptedRunError(Exception):
    """The user ended the run; no rank is left."""


class RankFailedError(Exception):
    """A rank failed, and all others were ended; the message is the report."""


def launch(options: TrainOptions) -> None:
    """Run one process per rank, and return when all have finished.

    Raises:
        InterruptedRunError: On Ctrl-C or SIGTERM.
        OptionsError: If the ranks find that the model cannot be cut as asked.
        RankFailedError: If a rank fails otherwise.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = options.nproc_per_node or 1
    _silence(logging.getLogger("torch.distributed.elastic"))
    with tempfile.TemporaryDirectory(prefix="autopipeline-") as logs, _ctrl_c_as_sigterm():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            run_id=uuid.uuid4().hex,
            max_restarts=0,
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            # One rank talks to the terminal; what the others say is told if they fail.
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, count), Std.ALL)),
        )
        # -P keeps a user's ./random.py or ./text.py from standing in for the real module.
        command = ("-P", "-m", "pp_recipe.rank", options.to_json())
        try:
            elastic_launch(config, sys.executable)(*command)
        except (SignalException, KeyboardInterrupt):
            raise InterruptedRunError from None
        except ChildFailedError as error:
            rank, failure = min(error.failures.items(), key=lambda item: _moment(item[1]))
            if refusal := _refusal(failure.error_file_data):
                raise OptionsError([refusal]) from None
            raise RankFailedError(
                _report(rank, failure.exitcode, failure.error_file_data, Path(logs))
            ) from None


def _silence(logger: logging.Logger) -> None:
    # torchrun's own accounts of signals and exit codes would bury our report.
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


@contextmanager
def _ctrl_c_as_sigterm() -> Iterator[None]:
    """Turn Ctrl-C into SIGTERM, which torchrun's agent passes on to the ranks.

    SIGINT itself would make each of them print the traceback of a KeyboardInterrupt. The ranks
    live in sessions of their own, so the terminal does not send it to them either.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt  # The agent does not listen yet: there are no ranks.
        signal.raise_signal(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _moment(failure: "ProcessFailure") -> float:
    """Order failures by their time: the first is the cause, the others lost their peer."""
    # torch's own timestamps are whole seconds, and a peer fails within milliseconds.
    if os.path.isfile(failure.error_file):
        return os.stat(failure.error_file).st_mtime
    # Without a file: ended by the agent after the failure, or gone before anyone could notice.
    return math.inf if failure.exitcode == -signal.SIGTERM else 0.0


def _refusal(recorded: dict[str, object]) -> str | None:
    """Return the problem that a rank found with the options, if that is why it ended."""
    message = recorded.get("message")
    said = str(message["message"]) if isinstance(message, dict) else ""
    kind, _, problem = said.partition(": ")
    return problem if kind == OptionsError.__name__ else None


def _report(rank: int, exitcode: int, recorded: dict[str, object], logs: Path) -> str:
    """Tell why a rank ended: its exception, or its signal and its last words."""
    message = recorded.get("message")
    if isinstance(message, dict):
        traceback = message["extraInfo"]["py_callstack"].rstrip()
        return f"rank {rank} failed, and the run was ended:\n{traceback}"
    if exitcode < 0:
        reason = f"was killed by {signal.Signals(-exitcode).name}"
        if -exitcode == signal.SIGKILL:
            reason += " (often: too little memory)"
    else:
        reason = f"exited with code {exitcode}"
    words = [path.read_text(errors="replace") for path in logs.rglob(f"{rank}/stderr.log")]
    tail = "\n".join("".join(words).strip().splitlines()[-20:])
    return f"rank {rank} {reason}, and the run was ended" + (f":\n{tail}" if tail else ".")
