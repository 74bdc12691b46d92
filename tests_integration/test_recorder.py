"""Recorded steps on real ranks: every action, on one clock, and the same numbers as without."""

import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_bufferpool import install_recv_buffer_pool
from pp_schedule import (
    Order,
    Timeline,
    build_pipeline_schedule,
    draw_html,
    dump_csv,
    measured_costs,
    record,
    resolve_schedule,
    schedule_order,
    simulate,
    stage_ids_this_rank,
)
from pp_schedule.clocks import align_clocks
from pp_schedule.orders import breadth_first_order

DIM, MICROBATCHES = 8, 8
NAMES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


class Pipeline:
    """This rank's stages and their schedule."""

    def __init__(self, name: str, csv: str | None = None) -> None:
        spec = resolve_schedule(name)
        rank, size = dist.get_rank(), dist.get_world_size()
        num_stages = size if spec.single_stage else 2 * size
        ids = stage_ids_this_rank(rank, size, num_stages, spec.style)
        self.parts, self.stages = [], []
        for index in ids:
            torch.manual_seed(index)
            self.parts.append(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)))
            stage = PipelineStage(self.parts[-1], index, num_stages, torch.device("cpu"))
            self.stages.append(stage)
        self.schedule = build_pipeline_schedule(
            csv, None if csv else name, 1, MICROBATCHES, self.stages, nn.functional.mse_loss
        )
        self.first, self.last = 0 in ids, num_stages - 1 in ids

    def step(self, call: str = "step") -> list[torch.Tensor]:
        """Return the losses and all gradients so far."""
        torch.manual_seed(1000)
        batch, target = torch.randn(2, MICROBATCHES, DIM)
        losses: list[torch.Tensor] = []
        getattr(self.schedule, call)(
            *([batch] if self.first else []), target=target if self.last else None, losses=losses
        )
        parameters = [p for part in self.parts for p in part.parameters()]
        return [t.clone() for t in [*losses, *(p.grad for p in parameters if p.grad is not None)]]

    def bound(self) -> list[set[str]]:
        """Return the names of what lies on the objects themselves."""
        return [set(vars(x)) for x in (self.schedule, *self.stages)]


class Recorded(NamedTuple):
    timeline: Timeline
    clock_error: float
    order: Order
    same_numbers: bool
    uninstalled: bool


def recorded(name: str, csv: str | None = None) -> Recorded:
    plain, watched = Pipeline(name, csv), Pipeline(name, csv)
    results = [plain.step(), plain.step()]
    also = [watched.step()]
    before = watched.bound()
    with record(watched.schedule) as recording:
        also.append(watched.step())
    uninstalled = watched.bound() == before
    same = all(
        torch.equal(a, b)
        for one, other in zip(results, also, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    timeline = recording.timeline()
    order = schedule_order(watched.schedule)
    return Recorded(timeline, recording.clock_error, order, same, uninstalled)


def check(rows: list[Recorded]) -> None:
    timeline, error, order = rows[0][:3]
    assert all(row.same_numbers and row.uninstalled for row in rows)
    assert all(row.timeline == timeline and row.clock_error == error for row in rows)
    for rank, actions in order.items():
        spans = [span for span in timeline.spans if span.rank == rank]
        assert [span.action for span in spans] == [a for a in actions if a is not None]
        assert all(span.end > span.start for span in spans)
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start
    assert min(span.start for span in timeline.spans) == 0.0
    assert max(span.end for span in timeline.spans) == timeline.makespan
    assert all(0.0 < bubble < 1.0 for bubble in timeline.bubbles)
    # What a stage makes exists before the next one uses it, as far as clocks can tell.
    assert 0.0 < error < 0.1
    spans_of = {span.action: span for span in timeline.spans}
    assert timeline.transfers
    for transfer in timeline.transfers:
        stage, kind, m = transfer.action
        users = [(stage + 1, "F", m)] if kind == "F" else [(stage - 1, k, m) for k in "BI"]
        used = next(span for action, span in spans_of.items() if action in users)
        assert (spans_of[transfer.action].rank, used.rank) == transfer[:2]
        assert used.start >= spans_of[transfer.action].end - error


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_action_once_and_the_same_numbers(
    ranks: RankPool, world_size: int, name: str
) -> None:
    check(ranks.run(world_size, recorded, name))


def test_an_order_from_a_file(ranks: RankPool, tmp_path: Path) -> None:
    order = breadth_first_order({0: [0, 3], 1: [1, 2]}, MICROBATCHES)
    dump_csv(order, tmp_path / "order.csv")
    check(ranks.run(2, recorded, "zbv", str(tmp_path / "order.csv")))


# --- clocks


def offsets() -> tuple[float, float]:
    """Clocks that are a thousand seconds per rank apart, on top of one that all share."""
    skew = 1000.0 * dist.get_rank()
    found = align_clocks(None, torch.device("cpu"), clock=lambda: time.perf_counter() + skew)
    return found.seconds + skew, found.error


def test_clocks_are_aligned_within_their_bound(ranks: RankPool) -> None:
    for rank, (wrong_by, error) in enumerate(ranks.run(4, offsets)):
        assert abs(wrong_by) <= error
        assert error < 0.1
        assert rank > 0 or error == 0.0


# --- what else there is to a block


def several_steps() -> tuple[list[Timeline], list[str]]:
    pipeline = Pipeline("1f1b")
    with record(pipeline.schedule) as recording:
        pipeline.step("eval")
        pipeline.step()
        pipeline.step()
        with pytest.raises(RuntimeError, match="leave its `with` block first"):
            recording.timeline()
    timelines = [recording.timeline(step) for step in range(3)]
    assert recording.timeline() == timelines[2]
    with pytest.raises(IndexError, match="there is no step 3: 3 were recorded"):
        recording.timeline(3)
    return timelines, sorted({span.action.kind for span in timelines[0].spans})


def test_steps_are_told_apart(ranks: RankPool) -> None:
    for timelines, kinds in ranks.run(2, several_steps):
        assert kinds == ["F"]  # an evaluation
        assert [len(t.spans) for t in timelines] == [2 * MICROBATCHES] + 2 * [4 * MICROBATCHES]
        assert timelines[1] != timelines[2]


def unequal_steps() -> None:
    pipeline = Pipeline("1f1b")
    with record(pipeline.schedule) as recording:
        pipeline.step()
    if dist.get_rank() == 1:
        recording._measured = []  # as if that rank had entered its block too late
    recording.timeline()


def test_ranks_that_recorded_different_steps(ranks: RankPool) -> None:
    for kind, message in ranks.run_expecting_error(2, unequal_steps):
        assert kind == "ValueError"
        assert "same number of steps" in message
        assert "[1, 0]" in message


def with_a_pool() -> bool:
    plain, pooled = Pipeline("1f1b"), Pipeline("1f1b")
    install_recv_buffer_pool(pooled.stages, pooled.schedule)
    bound = [dict(vars(stage)) for stage in pooled.stages]
    with record(pooled.schedule) as recording:
        also = pooled.step()
    results = plain.step()
    restored = all(
        vars(stage)["backward_one_chunk"] is before["backward_one_chunk"]
        for stage, before in zip(pooled.stages, bound, strict=True)
    )
    complete = len(recording.timeline().spans) == 2 * 2 * MICROBATCHES
    return restored and complete and all(map(torch.equal, results, also))


def test_others_methods_on_a_stage_are_kept(ranks: RankPool) -> None:
    assert ranks.run(2, with_a_pool) == [True, True]


# --- beside the simulator


class Sleepy(torch.autograd.Function):
    """Takes the time it is given, forwards once and backwards twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class SleepyPart(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleepy.apply(self.linear(x), self.seconds)


def sleepy(unit: float) -> tuple[Timeline, Order]:
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = unit * (1.5 if rank == 1 else 1.0)
    stage = PipelineStage(SleepyPart(seconds), rank, size, torch.device("cpu"))
    loss_fn = nn.functional.mse_loss
    schedule = build_pipeline_schedule(None, "1f1b", 1, MICROBATCHES, [stage], loss_fn)
    batch = torch.randn(MICROBATCHES, DIM)
    for _ in range(2):
        with record(schedule) as recording:
            schedule.step(
                *([batch] if stage.is_first else []), target=batch if stage.is_last else None
            )
    return recording.timeline(), schedule_order(schedule)


def test_measured_beside_simulated(ranks: RankPool, tmp_path: Path) -> None:
    unit = 0.01
    timeline, order = ranks.run(4, sleepy, unit)[0]
    costs = measured_costs(timeline)
    wanted = [unit, 1.5 * unit, unit, unit]
    assert list(costs.forward) == pytest.approx(wanted, rel=0.5)  # sleeps are never shorter
    assert all(found >= want for found, want in zip(costs.forward, wanted, strict=True))
    simulated = simulate(order, costs)
    assert 0.8 * simulated.makespan < timeline.makespan < 1.5 * simulated.makespan
    draw_html(timeline, tmp_path / "run.html", simulated=simulated, unit="s")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert '"name":"measured"' in text
    assert '"name":"simulated"' in text
