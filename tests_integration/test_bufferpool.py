"""Receive buffer pools on real ranks: same numbers as without, in memory that does not grow."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from pp_bufferpool import PoolStats, install_recv_buffer_pool
from pp_schedule import (
    build_forward_only_schedule,
    build_pipeline_schedule,
    set_stage_shapes,
    use_stage_shapes,
)

DIM, ROWS = 8, 2


class Part(nn.Module):
    """One stage; it may remember aliases of all that it is given, forwards and backwards."""

    def __init__(self, index: int, checkpointed: bool, remembers: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.checkpointed, self.remembers = checkpointed, remembers
        self.seen: list[torch.Tensor] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        if self.remembers:
            self.seen.append(x.detach()[:, 1:])
            if y.requires_grad:
                y.register_hook(lambda gradient: self.seen.append(gradient))
        # The gradient of an addition of 0 passes unchanged: what arrives is what `body` gets.
        return y + 0


class Pipeline:
    """One stage per rank, its schedule and what its steps gave."""

    def __init__(
        self,
        num_microbatches: int = 8,
        name: str = "1f1b",
        checkpointed: bool = False,
        remembers: bool = True,
    ) -> None:
        self.num_microbatches = num_microbatches
        rank, size = dist.get_rank(), dist.get_world_size()
        self.part = Part(rank, checkpointed, remembers)
        self.stage = PipelineStage(self.part, rank, size, torch.device("cpu"))
        self.schedule = build_pipeline_schedule(
            None, name, ROWS, ROWS * num_microbatches, [self.stage], nn.functional.mse_loss
        )
        self.results: list[torch.Tensor] = []

    def set_length(self, length: int) -> None:
        given = torch.empty(ROWS, length, DIM, device="meta")
        hidden = given.clone().requires_grad_()
        set_stage_shapes(self.stage, [given if self.stage.is_first else hidden], [hidden])
        use_stage_shapes(self.schedule)

    def step(self, length: int, seed: int = 0, schedule: Any = None) -> None:
        torch.manual_seed(1000 + seed)
        batch, target = torch.randn(2, ROWS * self.num_microbatches, length, DIM)
        losses: list[torch.Tensor] = []
        (schedule or self.schedule).step(
            *([batch] if self.stage.is_first else []),
            target=target if self.stage.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        self.results += [t.detach().clone() for t in losses + gradients]
        # What torch's inference of shapes showed the stage, which comes first, is left out.
        count = self.num_microbatches * (2 if torch.is_grad_enabled() else 1)
        self.results += [alias.clone() for alias in self.part.seen[-count:]]
        self.part.seen.clear()

    def same_as(self, other: "Pipeline") -> bool:
        """Whether every loss, gradient, input and received gradient is the other's, to the bit."""
        pairs = list(zip(self.results, other.results, strict=True))
        return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


def compare(
    scenario: Callable[[Pipeline], None], slack: int = 2, **options: Any
) -> tuple[bool, PoolStats]:
    """Run a scenario without and with a pool."""
    plain, pooled = Pipeline(**options), Pipeline(**options)
    pool = install_recv_buffer_pool([pooled.stage], pooled.schedule, slack)
    scenario(plain)
    scenario(pooled)
    return pooled.same_as(plain), pool.stats()


def two_steps(pipeline: Pipeline) -> None:
    pipeline.step(5)
    pipeline.step(5, seed=1)


def static_lengths(pipeline: Pipeline) -> None:
    for seed, length in enumerate([5, 3, 3, 6]):
        pipeline.set_length(length)
        pipeline.step(length, seed)


def inferred_lengths(pipeline: Pipeline) -> None:
    for seed, length in enumerate([5, 3, 6]):
        use_stage_shapes(pipeline.schedule)
        pipeline.step(length, seed)


def with_evaluations(pipeline: Pipeline) -> None:
    """Training steps, and between them another schedule that runs the same stages otherwise."""
    ids = {rank: [rank] for rank in range(dist.get_world_size())}
    loss_fn = nn.functional.mse_loss
    forwards = build_forward_only_schedule(
        [pipeline.stage], ids, pipeline.num_microbatches + 3, loss_fn
    )
    for seed in range(2):
        pipeline.set_length(5)
        pipeline.step(5, seed)
        use_stage_shapes(forwards)
        pipeline.num_microbatches += 3
        with torch.inference_mode():
            pipeline.step(5, seed, forwards)
        pipeline.num_microbatches -= 3
        pipeline.stage.clear_runtime_states()


SCENARIOS = {f.__name__: f for f in (two_steps, static_lengths, inferred_lengths, with_evaluations)}


def compare_by_name(name: str, options: dict[str, Any]) -> tuple[bool, PoolStats]:
    return compare(SCENARIOS[name], **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("slack", [0, 2])
def test_numbers_are_the_same_to_the_bit(
    ranks: RankPool, world_size: int, checkpointed: bool, slack: int
) -> None:
    options = {"checkpointed": checkpointed, "slack": slack}
    for rank, (same, stats) in enumerate(
        ranks.run(world_size, compare_by_name, "two_steps", options)
    ):
        assert same
        directions = (rank > 0) + (rank < world_size - 1)
        assert stats.buffers == directions * (1 + slack)
        assert stats.bytes == stats.buffers * ROWS * 5 * DIM * 4
        assert stats.fallbacks == 0


@pytest.mark.parametrize("name", ["static_lengths", "inferred_lengths", "with_evaluations"])
def test_shapes_and_schedules_may_change(ranks: RankPool, name: str) -> None:
    last_length = {"static_lengths": 6, "inferred_lengths": 6, "with_evaluations": 5}[name]
    for same, stats in ranks.run(2, compare_by_name, name, {"slack": 0}):
        assert same
        assert stats.bytes == ROWS * last_length * DIM * 4


def two_receives_at_once() -> tuple[bool, int]:
    """Whether a receive that finds its slot taken gets other memory; and how often that was."""
    pipeline = Pipeline()
    pool = install_recv_buffer_pool([pipeline.stage], pipeline.schedule, slack=0)
    pipeline.step(5)
    post = (
        pipeline.stage.get_bwd_recv_ops
        if pipeline.stage.is_first
        else pipeline.stage.get_fwd_recv_ops
    )
    addresses = {op.tensor.data_ptr() for m in range(3) for op in post(m)}
    return len(addresses) == 3, pool.stats().fallbacks


def test_a_slot_is_never_lent_twice(ranks: RankPool) -> None:
    assert ranks.run(2, two_receives_at_once) == [(True, 2)] * 2


def test_memory_does_not_grow_with_microbatches(ranks: RankPool) -> None:
    options = {"remembers": False, "num_microbatches": 8}
    few = ranks.run(4, compare_by_name, "two_steps", options)
    options["num_microbatches"] = 24
    many = ranks.run(4, compare_by_name, "two_steps", options)
    for (_, a), (same, b) in zip(few, many, strict=True):
        assert same
        assert (a.buffers, a.bytes, a.peak_live, a.peak_bytes) == (
            b.buffers, b.bytes, b.peak_live, b.peak_bytes,
        )  # fmt: skip
    # The inputs in flight, and one gradient; on the last stage a loss keeps no input alive.
    assert [stats.peak_live for _, stats in many] == [1, 4, 3, 1]


def another_pipeline() -> bool:
    """A pool on one of two pipelines that run in turns; the other is a GPipe."""
    plain, plain_gpipe = Pipeline(), Pipeline(name="gpipe")
    pooled, gpipe = Pipeline(), Pipeline(name="gpipe")
    on_class = dict(vars(PipelineStage))
    install_recv_buffer_pool([pooled.stage], pooled.schedule)
    assert dict(vars(PipelineStage)) == on_class
    assert not any("recv" in name and callable(value) for name, value in vars(gpipe.stage).items())
    for seed in range(2):
        for pipeline in (plain, plain_gpipe, pooled, gpipe):
            pipeline.step(5, seed)
    return pooled.same_as(plain) and gpipe.same_as(plain_gpipe)


def test_other_pipelines_are_untouched(ranks: RankPool) -> None:
    assert ranks.run(2, another_pipeline) == [True, True]


def other_schedule() -> tuple[list[str], bool, bool]:
    """The warnings of a pool on a GPipe, whether it is active, whether anything changed."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pp_bufferpool").addHandler(handler)
    pipeline = Pipeline(name="gpipe")
    before = set(vars(pipeline.stage))
    pool = install_recv_buffer_pool([pipeline.stage], pipeline.schedule)
    logging.getLogger("pp_bufferpool").removeHandler(handler)
    pool.uninstall()
    return messages, pool.active or pool.stats().active, set(vars(pipeline.stage)) == before


def test_another_schedule_warns_and_changes_nothing(ranks: RankPool) -> None:
    for messages, active, unchanged in ranks.run(2, other_schedule):
        assert len(messages) == 1
        assert "ScheduleGPipe" in messages[0]
        assert "no effect" in messages[0]
        assert not active
        assert unchanged


def install_late_and_uninstall() -> tuple[bool, bool]:
    """A pool from the second step on, and no longer at the third."""
    plain, pooled = Pipeline(), Pipeline()
    plain.step(5)
    pooled.step(5)
    before = set(vars(pooled.stage))
    pool = install_recv_buffer_pool([pooled.stage], pooled.schedule)
    with pytest.raises(ValueError, match="have a receive pool already"):
        install_recv_buffer_pool([pooled.stage], pooled.schedule)
    plain.step(5, seed=1)
    pooled.step(5, seed=1)
    pool.uninstall()
    pool.uninstall()
    restored = set(vars(pooled.stage)) == before and not pool.active
    plain.step(5, seed=2)
    pooled.step(5, seed=2)
    return pooled.same_as(plain), restored


def test_a_pool_may_come_late_and_go(ranks: RankPool) -> None:
    assert ranks.run(2, install_late_and_uninstall) == [(True, True)] * 2


def bad_slack() -> None:
    pipeline = Pipeline(num_microbatches=1)
    install_recv_buffer_pool([pipeline.stage], pipeline.schedule, slack=-1)


def test_slack_is_checked(ranks: RankPool) -> None:
    ((kind, message),) = ranks.run_expecting_error(1, bad_slack)
    assert kind == "ValueError"
    assert "slack=-1 must be an int of at least 0" in message
