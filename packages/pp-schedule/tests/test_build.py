from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from pp_schedule import (
    StageCosts,
    build_forward_only_schedule,
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    set_keyword_split,
    set_stage_shapes,
    simulate,
    stage_ids_this_rank,
    use_stage_shapes,
)
from pp_schedule.orders import breadth_first_order, gpipe_order, one_f_one_b_order


class Scaled(nn.Module):
    """A stage whose keyword argument may be cut with the batch or be the same for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.linear(x)
        x = x if scale is None else x * scale
        return x if bias is None else x + bias


def stages_here(num_stages: int) -> list[PipelineStage]:
    torch.manual_seed(3)
    cpu = torch.device("cpu")
    return [PipelineStage(Scaled(), index, num_stages, cpu) for index in range(num_stages)]


def whole(stages: list[PipelineStage], x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage.submod(x, **kwargs)
    return x


# --- what is refused


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 8), ["microbatch_size=0"]),
        ((2, -1), ["local_batch_size=-1"]),
        ((0, 0), ["microbatch_size=0", "local_batch_size=0"]),
        ((3, 8), ["local_batch_size=8", "microbatch_size=3", "6 or 9"]),
        ((3, 2), ["local_batch_size=2", "microbatch_size=3", "a batch of 3"]),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[int, int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot build the schedule") as caught:
        build_pipeline_schedule(None, None, *sizes, [], mse_loss)
    for word in [*words, "stages is empty", "pipeline_parallel_schedule_csv"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ids", "num_stages", "batch_size", "words"),
    [
        ("v_schedule", (1, 5), 8, 8, ["'v'", "rank 1 of 4 runs stages (1, 6)", "given are (1, 5)"]),
        ("dualpipev", (1, 5), 8, 8, ["'v'", "stages (1, 6)"]),
        ("interleaved_1f1b", (1, 6), 8, 8, ["'loop'", "stages (1, 5)", "given are (1, 6)"]),
        ("1f1b", (2,), 4, 4, ["'loop'", "stages (1,)", "given are (2,)"]),
        ("interleaved_1f1b", (1,), 8, 8, ["stages (1, 5)", "given are (1,)"]),
        ("1f1b", (1,), 4, 3, ["at least one microbatch per stage (4), not 3"]),
        (
            "1f1b",
            (1, 5),
            8,
            2,
            ["exactly 1 stage per rank", "at least one microbatch per stage (8)"],
        ),
        ("zbv", (1,), 4, 8, ["exactly 2 stages per rank"]),
        ("1f2b", (1,), 4, 8, ["no schedule '1f2b'", "'1f1b'"]),
    ],
)
def test_stages_that_do_not_fit(
    name: str,
    ids: tuple[int, ...],
    num_stages: int,
    batch_size: int,
    words: list[str],
    fake_stages: Callable[..., list[Any]],
) -> None:
    stages = fake_stages(1, 4, ids, num_stages)
    with pytest.raises(ValueError, match="schedule") as caught:
        build_pipeline_schedule(None, name, 1, batch_size, stages, mse_loss)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("order", "stage", "words"),
    [
        (gpipe_order(3, 4), 1, ["3 rows, but there are 4 ranks", "3F0 is missing"]),
        (gpipe_order(4, 3), 1, ["0F3 is missing"]),
        (
            gpipe_order(4, 4),
            3,
            ["row 1 runs stages [1], but the stages given on this rank are [3]"],
        ),
    ],
)
def test_a_csv_that_does_not_fit(
    order: Any,
    stage: int,
    words: list[str],
    fake_stages: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "order.csv"
    dump_csv(order, path)
    stages = fake_stages(1, 4, (stage,), 4)
    with pytest.raises(ValueError, match="cannot run") as caught:
        build_pipeline_schedule(str(path), None, 1, 4, stages, mse_loss)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["gpipe", "dfs", "zbv", "csv", "1f1b"])
def test_stages_under_ddp(name: str, fake_stages: Callable[..., list[Any]], tmp_path: Path) -> None:
    """torch prepares DDP for one forward before each backward: more give no or other gradients."""
    path = tmp_path / "order.csv"
    dump_csv(one_f_one_b_order(2, 4), path)
    csv = str(path) if name == "csv" else None
    style = "loop" if csv else resolve_schedule(name).style
    num_stages = 4 if name in ("dfs", "zbv") else 2
    stages = fake_stages(1, 2, stage_ids_this_rank(1, 2, num_stages, style), num_stages)
    for stage in stages:
        stage.submod = nn.parallel.DistributedDataParallel(stage.submod)
    if name == "1f1b":
        build_pipeline_schedule(None, name, 1, 4, stages, mse_loss)
        return
    with pytest.raises(ValueError, match="stage 1 is wrapped in DistributedDataParallel") as caught:
        build_pipeline_schedule(csv, name, 1, 4, stages, mse_loss)
    assert "use that, or fully_shard" in str(caught.value)


# --- what is built


@pytest.mark.parametrize("given", ["sorted", "reversed"])
@pytest.mark.parametrize("name", ["zbv", "looped_bfs", "zero_bubble"])
def test_the_order_in_which_stages_are_given_does_not_matter(
    name: str, given: str, fake_stages: Callable[..., list[Any]]
) -> None:
    spec = resolve_schedule(name)
    ids = stage_ids_this_rank(2, 4, 8, spec.style)
    stages = fake_stages(2, 4, ids if given == "sorted" else ids[::-1], 8)
    schedule = build_pipeline_schedule(None, name, 2, 16, stages, mse_loss)
    assert type(schedule) is spec.cls
    row = schedule_order(schedule)[2]
    assert {action.stage_index for action in row if action} == set(ids)


def test_orders_of_single_stage_schedules(fake_stages: Callable[..., list[Any]]) -> None:
    stages = fake_stages(1, 4, (1,), 4)
    build = build_pipeline_schedule
    assert schedule_order(build(None, "1f1b", 2, 12, stages, None)) == one_f_one_b_order(4, 6)
    assert schedule_order(build(None, "gpipe", 2, 12, stages, None)) == gpipe_order(4, 6)


def test_a_csv_overrides_the_name(fake_stages: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    ids = {rank: stage_ids_this_rank(rank, 4, 8, "v") for rank in range(4)}
    order = breadth_first_order(ids, 8)
    dump_csv(order, path)
    stages = fake_stages(3, 4, ids[3], 8)
    schedule = build_pipeline_schedule(str(path), "1f1b", 1, 8, stages, mse_loss)
    assert schedule_order(schedule) == order


def test_a_picture_of_what_is_built(fake_stages: Callable[..., list[Any]]) -> None:
    schedule = build_pipeline_schedule(None, "gpipe", 1, 8, fake_stages(0, 4, (0,), 4), None)
    timeline = simulate(schedule_order(schedule), StageCosts(1.0, 1.0, 1.0))
    assert timeline.bubble_fraction == pytest.approx(3 / 11)


# --- what it computes


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "looped_bfs", "dfs", "zero_bubble", "zbv", "csv"]
)
@pytest.mark.parametrize("scale_grads", [False, True])
def test_gradients_accumulate_over_steps(
    name: str, scale_grads: bool, one_rank: None, tmp_path: Path
) -> None:
    num_stages = 1 if name in ("1f1b", "gpipe") else 2
    stages = stages_here(num_stages)
    path = tmp_path / "order.csv"
    dump_csv(breadth_first_order({0: range(num_stages)}, 4), path)
    schedule = build_pipeline_schedule(
        str(path) if name == "csv" else None, name, 2, 8, stages, mse_loss, scale_grads
    )
    batches = [(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(2)]
    wanted = []
    for x, y in batches:
        loss = mse_loss(whole(stages, x), y) * (1 if scale_grads else 4)
        loss.backward()
        wanted.append(float(loss.detach()) / (1 if scale_grads else 4))
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    for (x, y), loss in zip(batches, wanted, strict=True):
        losses: list[torch.Tensor] = []
        schedule.step(x, target=y, losses=losses)
        # Reported as the loss function gave them, scaled or not.
        assert float(torch.stack(losses).mean()) == pytest.approx(loss, rel=1e-5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_forward_only(num_stages: int, one_rank: None) -> None:
    stages = stages_here(num_stages)
    schedule = build_forward_only_schedule(stages, {0: range(num_stages)}, 4, mse_loss)
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        output = schedule.step(x, target=y, losses=losses)
        wanted = whole(stages, x)
    torch.testing.assert_close(output, wanted)
    assert float(torch.stack(losses).mean()) == pytest.approx(float(mse_loss(wanted, y)), rel=1e-5)
    assert all(p.grad is None for stage in stages for p in stage.submod.parameters())


def test_keywords_are_cut_along_the_dim_that_is_named(one_rank: None) -> None:
    stages = stages_here(2)
    schedule = build_forward_only_schedule(stages, {0: (0, 1)}, 4, None)
    x = torch.randn(8, 3)
    with torch.no_grad():
        # A scale per row, and a bias that all rows share.
        kwargs = {"scale": torch.randn(8, 1), "bias": torch.randn(1, 3)}
        set_keyword_split(schedule, {"scale": 0, "bias": None})
        torch.testing.assert_close(schedule.step(x, **kwargs), whole(stages, x, **kwargs))
        # The same keywords, the other way round.
        kwargs = {"scale": torch.randn(1, 3), "bias": torch.randn(8, 3)}
        set_keyword_split(schedule, {"scale": None, "bias": 0})
        torch.testing.assert_close(schedule.step(x, **kwargs), whole(stages, x, **kwargs))


def test_no_forward_is_run_to_learn_shapes_that_are_set(one_rank: None) -> None:
    stages = stages_here(2)
    calls: list[torch.Size] = []
    for stage in stages:
        stage.submod.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    schedule = build_pipeline_schedule(None, "looped_bfs", 2, 4, stages, mse_loss)
    for length in (5, 3, 7):
        states = torch.empty(2, length, 3, device="meta", requires_grad=True)
        set_stage_shapes(stages[0], [torch.empty(2, length, 3, device="meta")], [states])
        set_stage_shapes(stages[1], [states], [states])
        use_stage_shapes(schedule)
        x, y = torch.randn(4, length, 3), torch.randn(4, length, 3)
        calls.clear()
        losses: list[torch.Tensor] = []
        schedule.step(x, target=y, losses=losses)
        assert calls == [(2, length, 3)] * 4
        with torch.no_grad():
            wanted = mse_loss(whole(stages, x), y)
        torch.testing.assert_close(torch.stack(losses).mean().detach(), wanted)
