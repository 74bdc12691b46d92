"""Receive buffer pools on real ranks: same numbers as without, in memory that does not grow."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

from pp_bufferpool import PoolStats, install_recv_buffer_pool, recv_buffer_counts
from pp_bufferpool.slots import Slot
from pp_bufferpool.torch_private import PREALLOCATES, STAGE_METHODS
from pp_schedule import (
    Costs,
    LayerCosts,
    Order,
    build_forward_only_schedule,
    build_order_schedule,
    build_pipeline_schedule,
    named_order,
    plan,
    resolve_schedule,
    set_stage_shapes,
    stage_ids_this_rank,
    use_stage_shapes,
    v_half_order,
    zb_h1_order,
)

DIM, ROWS, MICROBATCHES = 8, 2, 8
UNEVEN = Costs(
    [LayerCosts(1.0 + i % 3, 1.2, 0.5, 1.0, 1.0) for i in range(6)],
    first=LayerCosts(0.3, 0.0, 0.3, 0.5, 2.0),
    last=LayerCosts(2.0, 2.5, 2.0, 2.0, 2.0),
    boundary_bytes=0.1,
)


@cache
def planned(pp_size: int) -> Order:
    """An order of the planner's own."""
    found = plan(UNEVEN, pp_size, MICROBATCHES, effort=0.05)
    own = [candidate.order for candidate in found.candidates if candidate.schedule == "own"]
    assert own
    return own[0]


NAMES = [
    "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule", "dualpipev",
]  # fmt: skip
ORDERS: dict[str, Callable[[int], Order]] = {
    "1f1b from a file": lambda p: named_order(resolve_schedule("1f1b"), p, p, MICROBATCHES),
    "zb_h1": lambda p: zb_h1_order(p, MICROBATCHES),
    "v_half": lambda p: v_half_order(p, MICROBATCHES),
    "planner's": planned,
}


class Part(nn.Module):
    """One stage, of one, two or three layers.

    Args:
        index: Stage index.
        checkpointed: Whether the layers are computed again in the backward.
        remembers: Whether to keep aliases of all that is received, forwards and backwards.
    """

    def __init__(self, index: int, checkpointed: bool, remembers: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(1 + index % 3))
        self.checkpointed, self.remembers = checkpointed, remembers
        self.seen: list[torch.Tensor] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        if self.remembers:
            self.seen.append(x.detach()[:, 1:])
            if y.requires_grad:
                y.register_hook(lambda gradient: self.seen.append(gradient))
        # The gradient of an addition of 0 passes unchanged: what arrives is what `body` gets.
        return y + 0


class Pipeline:
    """This rank's stages, their schedule and what its steps gave.

    Args:
        schedule: A schedule's name, or every rank's actions.
        num_microbatches: Microbatches per step; orders have a number of their own.
        checkpointed: See `Part`.
        remembers: See `Part`.
    """

    def __init__(
        self,
        schedule: str | Order = "1f1b",
        num_microbatches: int = MICROBATCHES,
        checkpointed: bool = False,
        remembers: bool = False,
    ) -> None:
        self.num_microbatches = num_microbatches
        rank, size = dist.get_rank(), dist.get_world_size()
        if isinstance(schedule, str):
            spec = resolve_schedule(schedule)
            num_stages = size if spec.single_stage else 2 * size
            ids: Sequence[int] = stage_ids_this_rank(rank, size, num_stages, spec.style)
        else:
            placed = [{a.stage_index for a in row if a is not None} for row in schedule.values()]
            num_stages, ids = sum(map(len, placed)), sorted(placed[rank])
        self.parts = [Part(index, checkpointed, remembers) for index in ids]
        self.stages = [
            PipelineStage(part, index, num_stages, torch.device("cpu"))
            for part, index in zip(self.parts, ids, strict=True)
        ]
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)
        sizes = ROWS, ROWS * num_microbatches, self.stages, nn.functional.mse_loss
        self.schedule = (
            build_pipeline_schedule(None, schedule, *sizes)
            if isinstance(schedule, str)
            else build_order_schedule(schedule, *sizes)
        )
        self.results: list[torch.Tensor] = []

    def set_length(self, length: int) -> None:
        given = torch.empty(ROWS, length, DIM, device="meta")
        hidden = given.clone().requires_grad_()
        for stage in self.stages:
            set_stage_shapes(stage, [given if stage.is_first else hidden], [hidden])
        use_stage_shapes(self.schedule)

    def step(self, length: int, seed: int = 0, schedule: Any = None) -> None:
        torch.manual_seed(1000 + seed)
        batch, target = torch.randn(2, ROWS * self.num_microbatches, length, DIM)
        losses: list[torch.Tensor] = []
        (schedule or self.schedule).step(
            *([batch] if self.has_first else []),
            target=target if self.has_last else None,
            losses=losses,
            return_outputs=False,
        )
        found = [p.grad for part in self.parts for p in part.parameters() if p.grad is not None]
        self.results += [tensor.detach().clone() for tensor in losses + found]
        # What torch's inference of shapes showed the stage, which comes first, is left out.
        count = self.num_microbatches * (2 if torch.is_grad_enabled() else 1)
        for part in self.parts:
            self.results += [alias.clone() for alias in part.seen[-count:]]
            part.seen.clear()

    def same_as(self, other: "Pipeline") -> bool:
        """Whether every loss, gradient and remembered alias is the other's, to the bit."""
        pairs = list(zip(self.results, other.results, strict=True))
        return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


Scenario = Callable[[Pipeline], None]


def compare(scenario: Scenario, slack: int = 0, **options: Any) -> tuple[bool, PoolStats, int]:
    """Run a scenario without and with a pool; also the slots that the order says are enough."""
    plain, pooled = Pipeline(**options), Pipeline(**options)
    pool = install_recv_buffer_pool(pooled.stages, pooled.schedule, slack)
    pool.poison = True
    scenario(plain)
    scenario(pooled)
    wanted = recv_buffer_counts(pooled.schedule, slack)[dist.get_rank()].with_pool
    return pooled.same_as(plain), pool.stats(), wanted


def two_steps(pipeline: Pipeline) -> None:
    pipeline.step(5)
    pipeline.step(5, seed=1)


def inferred_lengths(pipeline: Pipeline) -> None:
    for seed, length in enumerate([5, 3, 6, 3]):
        use_stage_shapes(pipeline.schedule)
        pipeline.step(length, seed)


def set_lengths(pipeline: Pipeline) -> None:
    for seed, length in enumerate([5, 3, 3, 6]):
        pipeline.set_length(length)
        pipeline.step(length, seed)


def with_evaluations(pipeline: Pipeline) -> None:
    """Training steps, and between them another schedule that runs the same stages otherwise."""
    size = dist.get_world_size()
    ids = {rank: stage_ids_this_rank(rank, size, 2 * size, "v") for rank in range(size)}
    loss_fn = nn.functional.mse_loss
    more = pipeline.num_microbatches + 3
    forwards = build_forward_only_schedule(pipeline.stages, ids, more, loss_fn)
    for seed in range(2):
        pipeline.set_length(5)
        pipeline.step(5, seed)
        pipeline.num_microbatches += 3
        with torch.inference_mode():
            pipeline.step(5, seed, forwards)
        pipeline.num_microbatches -= 3


SCENARIOS = {f.__name__: f for f in (two_steps, inferred_lengths, set_lengths, with_evaluations)}


def compare_by_name(name: str, slack: int, options: dict[str, Any]) -> tuple[bool, PoolStats, int]:
    return compare(SCENARIOS[name], slack, **options)


# --- the same numbers


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *ORDERS])
def test_numbers_are_the_same_to_the_bit(
    ranks: RankPool, name: str, world_size: int, checkpointed: bool
) -> None:
    schedule = ORDERS[name](world_size) if name in ORDERS else name
    options = {"schedule": schedule, "checkpointed": checkpointed}
    runs = ranks.run(world_size, compare_by_name, "inferred_lengths", 0, options)
    for same, stats, wanted in runs:
        assert same
        # As few slots as the order allows, and nobody holds one for longer than it says.
        assert stats.buffers == wanted > 0
        assert stats.fallbacks == 0
        assert stats.bytes == stats.buffers * ROWS * 6 * DIM * 4
        assert stats.peak_live == stats.buffers


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "v_schedule"])
def test_what_a_model_keeps_stays_as_it_was(ranks: RankPool, name: str, slack: int) -> None:
    options = {"schedule": name, "remembers": True}
    runs = ranks.run(2, compare_by_name, "two_steps", slack, options)
    assert all(same for same, _, _ in runs)
    assert all(stats.fallbacks > 0 for _, stats, _ in runs)


def lend_blindly() -> bool:
    """Whether the above would notice slots that are lent while somebody holds them."""
    before = Slot.is_free
    Slot.is_free = property(lambda slot: True)  # type: ignore[assignment,method-assign]
    try:
        return compare(two_steps, schedule="1f1b", remembers=True)[0]
    finally:
        Slot.is_free = before  # type: ignore[method-assign]


def test_a_slot_lent_too_early_would_be_seen(ranks: RankPool) -> None:
    assert ranks.run(2, lend_blindly) == [False, False]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("set_lengths", "1f1b"), ("set_lengths", "v_schedule"), ("with_evaluations", "v_schedule")],
)
def test_shapes_and_schedules_may_change(ranks: RankPool, scenario: str, name: str) -> None:
    for same, stats, wanted in ranks.run(2, compare_by_name, scenario, 0, {"schedule": name}):
        assert same
        assert stats.buffers == wanted


# --- memory


def evaluate(num_microbatches: int) -> PoolStats:
    pipeline = Pipeline("v_schedule", num_microbatches)
    pool = install_recv_buffer_pool(pipeline.stages, pipeline.schedule, slack=0)
    with_evaluations(pipeline)
    return pool.stats()


def test_an_evaluation_keeps_no_inputs(ranks: RankPool) -> None:
    few, many = ranks.run(2, evaluate, 8), ranks.run(2, evaluate, 24)
    for a, b in zip(few, many, strict=True):
        assert (a.peak_live, a.fallbacks) == (b.peak_live, b.fallbacks)


@pytest.mark.parametrize(
    ("name", "live"),
    [("1f1b", [1, 4, 3, 1]), ("interleaved_1f1b", [5, 11, 9, 8]), ("v_schedule", [3, 11, 12, 7])],
)
def test_memory_does_not_grow_with_microbatches(
    ranks: RankPool, name: str, live: list[int]
) -> None:
    few, many = (
        ranks.run(4, compare_by_name, "two_steps", 0, {"schedule": name, "num_microbatches": n})
        for n in (16, 32)
    )
    for (_, a, _), (same, b, _), buffers in zip(few, many, live, strict=True):
        assert same
        assert a.buffers == a.peak_live == a.allocations == buffers
        assert b.buffers == b.peak_live == b.allocations == buffers
        assert a.bytes == b.bytes == b.allocated_bytes
        assert b.fallbacks == 0
        assert b.buffers_without_pool >= buffers


def torchs_own(pooled: bool) -> tuple[int, int, int]:
    """Inputs of the last stage alive at once; what a pool says of it with and without itself.

    The schedule is torch's as its constructor makes it, which keeps every loss.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Part(rank, False, False), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
    pool = install_recv_buffer_pool([stage], schedule, slack=0) if pooled else None
    inputs: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def look(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        inputs.append(weakref.ref(given[0]))
        alive.append(sum(reference() is not None for reference in inputs))

    batch = torch.randn(ROWS * MICROBATCHES, 5, DIM)
    for _ in range(2):
        inputs.clear()
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == size - 1 else None)
        stage.submod.register_forward_pre_hook(look)
    counts = recv_buffer_counts(schedule, 0)[size - 1]
    assert pool is None or pool.stats().buffers == counts.with_pool or rank < size - 1
    return max(alive), counts.with_pool, counts.without_pool


def test_the_losses_that_torch_keeps_hold_no_inputs(ranks: RankPool) -> None:
    _, (live, _, counted) = ranks.run(2, torchs_own, False)
    assert PREALLOCATES or live == MICROBATCHES
    assert counted == MICROBATCHES
    _, (live, slots, _) = ranks.run(2, torchs_own, True)
    assert live == slots == 1


def addresses() -> list[set[int]]:
    """Where each of three steps received."""
    pipeline = Pipeline("interleaved_1f1b")
    install_recv_buffer_pool(pipeline.stages, pipeline.schedule)
    seen: list[set[int]] = []

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[-1].add(inputs[0].data_ptr())

    for part, stage in zip(pipeline.parts, pipeline.stages, strict=True):
        if not stage.is_first:
            part.register_forward_pre_hook(look)
    pipeline.set_length(5)
    for seed in range(3):
        seen.append(set())
        pipeline.step(5, seed)
    return seen


def test_addresses_are_fixed(ranks: RankPool) -> None:
    for first, second, third in ranks.run(2, addresses):
        assert first
        assert first == second == third


class TwoStreams(nn.Module):
    """A stage of two outputs of unlike shapes; the second needs no gradient."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layer = nn.Linear(DIM, DIM)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], dtype=torch.int64).expand(x.shape[:2]).contiguous()
        y = self.layer(x) * positions[..., None].cos()
        positions.add_(0)  # in place: tensors of one receive must not be one memory to a compiler
        return y if dist.get_rank() == dist.get_world_size() - 1 else (y, positions + 1)


def several_tensors(compiled: bool) -> tuple[list[torch.Tensor], int]:
    """The gradients without and with a pool, and the slots of that."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    pool = None
    for pooled in (False, True):
        part = TwoStreams(rank)
        if compiled:
            part.compile(backend="aot_eager")
        x = torch.empty(ROWS, 5, DIM, device="meta")
        positions = torch.empty(ROWS, 5, dtype=torch.int64, device="meta")
        given = (x,) if rank == 0 else (x.requires_grad_(), positions)
        hidden = torch.empty_like(x).requires_grad_()
        made = (hidden,) if rank == size - 1 else (hidden, positions)
        stage = PipelineStage(
            part, rank, size, torch.device("cpu"), input_args=given, output_args=made
        )
        schedule = build_pipeline_schedule(
            None, "1f1b", ROWS, ROWS * MICROBATCHES, [stage], nn.functional.mse_loss
        )
        if pooled:
            pool = install_recv_buffer_pool([stage], schedule, slack=0)
        torch.manual_seed(7)
        batch, target = torch.randn(2, ROWS * MICROBATCHES, 5, DIM)
        schedule.step(*([batch] if rank == 0 else []), target=target if rank == size - 1 else None)
        results.append(part.layer.weight.grad)
    assert pool is not None
    return results, pool.stats().buffers


@pytest.mark.parametrize("compiled", [False, True])
def test_several_tensors_are_one_receive(ranks: RankPool, compiled: bool) -> None:
    for (plain, pooled), slots in ranks.run(2, several_tensors, compiled):
        assert torch.equal(plain, pooled)
        assert slots == 1


# --- which objects


def another_pipeline() -> bool:
    """A pool on one of two pipelines that run in turns."""
    plain, plain_gpipe = Pipeline(), Pipeline("gpipe")
    pooled, gpipe = Pipeline(), Pipeline("gpipe")
    on_class = dict(vars(PipelineStage))
    install_recv_buffer_pool(pooled.stages, pooled.schedule)
    assert dict(vars(PipelineStage)) == on_class
    assert not vars(gpipe.stages[0]).keys() & set(STAGE_METHODS)
    for seed in range(2):
        for pipeline in (plain, plain_gpipe, pooled, gpipe):
            pipeline.step(5, seed)
    return pooled.same_as(plain) and gpipe.same_as(plain_gpipe)


def test_other_pipelines_are_untouched(ranks: RankPool) -> None:
    assert ranks.run(2, another_pipeline) == [True, True]


def install_late_and_uninstall(name: str) -> tuple[bool, bool]:
    """A pool from the second step on, and no longer at the third."""
    plain, pooled = Pipeline(name), Pipeline(name)
    plain.step(5)
    pooled.step(5)
    before = [dict(vars(stage)) for stage in pooled.stages]
    pool = install_recv_buffer_pool(pooled.stages, pooled.schedule)
    with pytest.raises(ValueError, match="have a receive pool already"):
        install_recv_buffer_pool(pooled.stages, pooled.schedule)
    plain.step(5, seed=1)
    pooled.step(5, seed=1)
    pool.uninstall()
    pool.uninstall()
    restored = not pool.active and not pool.stats().active
    for stage, old in zip(pooled.stages, before, strict=True):
        restored &= vars(stage).keys() == old.keys()
        restored &= all(vars(stage)[name] is old[name] for name in STAGE_METHODS if name in old)
    plain.step(5, seed=2)
    pooled.step(5, seed=2)
    return pooled.same_as(plain), restored


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "v_schedule"])
def test_a_pool_may_come_late_and_go(ranks: RankPool, name: str) -> None:
    assert ranks.run(2, install_late_and_uninstall, name) == [(True, True)] * 2


def wrapped_since() -> None:
    pipeline = Pipeline()
    pool = install_recv_buffer_pool(pipeline.stages, pipeline.schedule)
    stage = pipeline.stages[0]
    vars(stage)["forward_one_chunk"] = lambda *args, **kwargs: None
    pool.uninstall()


def bad_slack() -> None:
    pipeline = Pipeline(num_microbatches=1)
    install_recv_buffer_pool(pipeline.stages, pipeline.schedule, slack=-1)


def another_schedules_stages() -> None:
    first, second = Pipeline(num_microbatches=1), Pipeline(num_microbatches=1)
    install_recv_buffer_pool(first.stages, second.schedule)


def no_stages() -> None:
    install_recv_buffer_pool([], Pipeline(num_microbatches=1).schedule)


def another_torch() -> None:
    """A stage of a torch that keeps its receives elsewhere."""
    pipeline = Pipeline(num_microbatches=1)
    del pipeline.stages[0].grad_recv_info
    install_recv_buffer_pool(pipeline.stages, pipeline.schedule)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (wrapped_since, "RuntimeError", "forward_one_chunk of its stages were replaced after"),
        (bad_slack, "ValueError", "slack=-1 must be an int of at least 0"),
        (no_stages, "ValueError", "stages is empty"),
        (
            another_schedules_stages,
            "ValueError",
            "of indices [0], are not the objects that this schedule runs",
        ),
        (another_torch, "RuntimeError", "has no PipelineStage.grad_recv_info, without which"),
    ],
)
def test_what_is_refused(ranks: RankPool, wrong: Callable[[], None], kind: str, words: str) -> None:
    ((found, message),) = ranks.run_expecting_error(1, wrong)
    assert found == kind
    assert words in message
