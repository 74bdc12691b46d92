import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, RanksFailed


@dataclass
class Answer:
    rank: int
    total: torch.Tensor


def all_reduce(scale: float) -> Answer:
    total = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total)


def process_id() -> int:
    return os.getpid()


def settings() -> tuple[int, float]:
    return torch.get_num_threads(), torch.rand(()).item()


def raise_on(rank: int, then_wait: bool) -> str:
    if dist.get_rank() == rank:
        raise KeyError("no such layer")
    if then_wait:
        dist.all_reduce(torch.ones(1))
    return "fine"


def refuse() -> None:
    raise ValueError(f"rank {dist.get_rank()} refuses")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sleep_in_here()


def sleep_in_here() -> None:
    time.sleep(100)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def big() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(4_000_000), "y": torch.ones(2, dtype=torch.bfloat16)}


def return_unpicklable() -> object:
    return lambda: None


@pytest.fixture(scope="module")
def hasty() -> Iterator[RankPool]:
    pool = RankPool(grace=1.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(world_size, all_reduce, 2.0)
    assert [answer.rank for answer in answers] == list(range(world_size))
    expected = 2.0 * sum(range(1, world_size + 1))
    assert all(answer.total.tolist() == [expected] * 3 for answer in answers)


def test_processes_are_reused_and_added(ranks: RankPool) -> None:
    two = ranks.run(2, process_id)
    four = ranks.run(4, process_id)
    assert four[:2] == two
    assert len(set(four)) == 4
    assert ranks.run(4, process_id) == four


def test_threads_and_seed_are_the_same_in_every_call(ranks: RankPool) -> None:
    first = ranks.run(2, settings)
    assert first == ranks.run(2, settings)
    assert first[0] == first[1]
    assert first[0][0] == 1


def test_large_tensors_come_back(ranks: RankPool) -> None:
    for result in ranks.run(2, big):
        assert torch.equal(result["x"], torch.arange(4_000_000))
        assert result["y"].dtype == torch.bfloat16


def test_an_exception_on_one_rank_is_told_within_seconds(hasty: RankPool) -> None:
    hasty.run(2, process_id)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        hasty.run(2, raise_on, 1, True)
    assert time.monotonic() - start < 8
    message = str(caught.value)
    assert "failed: ranks [1]; not finished soon after the first failure: ranks [0]" in message
    assert "rank 1 raised KeyError: 'no such layer'" in message
    assert "in raise_on" in message
    assert "all_reduce" in message[message.index("rank 0 had not finished") :]
    assert message.index("rank 1 raised") < message.index("rank 0 had not finished")
    assert hasty.run(2, all_reduce, 1.0)[0].total[0] == 3


def test_ranks_that_returned_are_told(hasty: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 0 returned"):
        hasty.run(2, raise_on, 1, False)


def test_a_hang_shows_the_stack(hasty: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        hasty.run(2, hang_on, 1, timeout=2)
    message = str(caught.value)
    assert "not finished within 2 s: ranks [1]" in message
    assert "in sleep_in_here" in message
    assert hasty.run(2, all_reduce, 1.0)[0].total[0] == 3


def test_a_killed_rank_comes_before_its_peer(hasty: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        hasty.run(2, die_on, 1)
    message = str(caught.value)
    assert "rank 1 died: SIGKILL" in message
    assert "last words" in message
    assert message.index("rank 1 died") < message.index("rank 0 ")
    assert hasty.run(2, all_reduce, 1.0)[0].total[0] == 3


def test_errors_that_are_expected(hasty: RankPool) -> None:
    errors = hasty.run_expecting_error(2, refuse)
    assert errors == [("ValueError", "rank 0 refuses"), ("ValueError", "rank 1 refuses")]
    with pytest.raises(RanksFailed, match=r"returned instead .* \{0: 'fine'\}"):
        hasty.run_expecting_error(2, raise_on, 1, False)


def test_what_cannot_be_sent_is_refused(hasty: RankPool) -> None:
    with pytest.raises(TypeError, match="module-level"):
        hasty.run(1, lambda: None)
    with pytest.raises(RanksFailed, match="pickle"):
        hasty.run(1, return_unpicklable)


def test_closed_pool() -> None:
    pool = RankPool()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(1, process_id)
