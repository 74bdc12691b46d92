"""Steps that succeed on all ranks or raise on all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


class AllOrNone:
    """The ranks of a group, or one process alone where there is no process group.

    Args:
        group: The ranks; None means all of the job.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._alone = not dist.is_initialized()
        self.rank = 0 if self._alone else dist.get_rank(group)

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, on every rank; all call it."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def step(
        self,
        failure: str,
        clean_up: Callable[[], None] = lambda: None,
        error: type[Exception] = RuntimeError,
    ) -> Iterator[None]:
        """Run a step on every rank, and raise on all of them if it failed on one.

        Nothing in the step may wait for another rank.

        Args:
            failure: What to say has failed.
            clean_up: Called on every rank before the error is raised.
            error: What to raise; of its own kind an exception is told without its type.

        Raises:
            RuntimeError: Or `error`, naming each rank that failed and why; the cause is this rank's
                own.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as caught:
            own = caught
        told = None if own is None else str(own) if type(own) is error else _with_type(own)
        said = self.gather(told)
        if any(said):
            clean_up()
            raise error("\n  ".join([f"{failure}:", *_reasons(said)])) from own


def _with_type(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _reasons(said: list[str | None]) -> list[str]:
    """Return what failed and where, each reason once."""
    ranks: dict[str, list[str]] = {}
    for rank, why in enumerate(said):
        if why is not None:
            ranks.setdefault(why, []).append(str(rank))
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(said):
        return list(ranks)
    return [
        f"rank{'s' if len(where) > 1 else ''} {', '.join(where)}: {why}"
        for why, where in ranks.items()
    ]
