import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def work_of() -> Callable[..., tuple[int, Any]]:
    """Counts the lines of Python that a call runs, the same on every machine; and its result."""

    def count(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
        lines = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = function(*args)
        finally:
            sys.settrace(before)
        return lines, result

    return count


@pytest.fixture
def fake_stages() -> Iterator[Callable[..., list[Any]]]:
    """Makes the stages of one rank of a world in which nothing is sent."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(rank: int, pp_size: int, ids: tuple[int, ...], num_stages: int) -> list[Any]:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=pp_size, store=FakeStore())
        return [
            PipelineStage(torch.nn.Linear(2, 2), index, num_stages, torch.device("cpu"))
            for index in ids
        ]

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A real process group of this process alone."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()
