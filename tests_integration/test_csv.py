"""A schedule file trains as the named schedule that it came from, to the last bit, or is refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_schedule import (
    SCHEDULE_NAMES,
    build_pipeline_schedule,
    dump_csv,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)
from pp_schedule.orders import gpipe_order, one_f_one_b_order

WIDTH = 4
MICROBATCHES = 8
# Every class once: other names are other spellings.
NAMES = sorted({resolve_schedule(name).name for name in SCHEDULE_NAMES})


def make_stages(name: str) -> list[PipelineStage]:
    """This rank's stages, with weights that depend on the stage alone."""
    spec = resolve_schedule(name)
    rank, pp_size = dist.get_rank(), dist.get_world_size()
    num_stages = pp_size * (spec.stages_per_rank or 2)
    stages = []
    for index in stage_ids_this_rank(rank, pp_size, num_stages, spec.style):
        torch.manual_seed(index)
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        stages.append(PipelineStage(part, index, num_stages, torch.device("cpu")))
    return stages


def train(name: str, csv: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The gradients and losses of two steps."""
    stages = make_stages(name)
    schedule = build_pipeline_schedule(
        csv, None if csv else name, 1, MICROBATCHES, stages, nn.functional.mse_loss, True
    )
    torch.manual_seed(100)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        x = torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64)
        y = torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        last = any(stage.is_last for stage in stages)
        schedule.step(*inputs, target=y if last else None, losses=losses if last else None)
    gradients = {
        f"{stage.stage_index}.{name}": parameter.grad.clone()
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
        if parameter.grad is not None
    }
    return gradients, [float(loss) for loss in losses]


def write_csv(name: str, path: str, with_communication: bool) -> None:
    """Write what a named schedule runs; every rank knows all of it."""
    schedule = build_pipeline_schedule(None, name, 1, MICROBATCHES, make_stages(name), None)
    if dist.get_rank() == 0:
        dump_csv(schedule_order(schedule), path, with_communication)
    dist.barrier()


def train_all_ways(name: str, folder: str) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """By name, and by a file of either format."""
    runs = [train(name, None)]
    for with_communication in (False, True):
        path = f"{folder}/{with_communication}.csv"
        write_csv(name, path, with_communication)
        runs.append(train(name, path))
    return runs


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_trains_as_its_schedule(
    ranks: RankPool, name: str, world_size: int, tmp_path: Path
) -> None:
    for by_name, *by_file in ranks.run(world_size, train_all_ways, name, str(tmp_path)):
        gradients, losses = by_name
        assert gradients
        assert all(bool(gradient.any()) for gradient in gradients.values())
        for theirs, their_losses in by_file:
            assert their_losses == losses
            assert theirs.keys() == gradients.keys()
            for parameter, gradient in gradients.items():
                assert torch.equal(theirs[parameter], gradient), parameter


BROKEN = {
    # A file with its communication, on which torch would hang,
    ("0SEND_F3,", ""): "0SEND_F3 is missing after 0F3 (rank 0",
    ("0B3,", ""): "needs 0B3",
    ("1RECV_F0,1F0", "1F0,1RECV_F0"): "1RECV_F0 (rank 1, action 2) comes after 1F0",
    # compute other gradients,
    ("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"): "0SEND_F1 (rank 0, action 3) arrives at",
    # leave them unscaled,
    ("1REDUCE_GRAD,", ""): "1REDUCE_GRAD is missing after 1B7 (rank 1",
    # or overlook what does not belong there.
    ("0F1,", "0F1 ?,"): "row 0, column 3: '0F1 ?' is not an action",
    ("0F1,", "0F1,0F1,"): "0F1 (rank 0, action 4): repeats rank 0, action 3",
    ("1F1,", "0F1,"): "0F1 (rank 1",
}
BROKEN_ORDERS = {
    ("0F0,0F1", "0B0,0F0,0F1"): "0B0 (rank 0, action 3): repeats rank 0, action 0",
    ("0F0,0F1,0B0", "0F0,0B0,0F1"): "1F1 (rank 1, action 1) waits for ever for 0F1",
    ("0B7", ""): "stage 0, microbatch 7 needs 0B7",
    ("1F7", "1F70"): "1F70 (rank 1, action 14): there are microbatches 0..7 only",
}


def refusals(paths: list[str]) -> list[str]:
    """What this rank says to each file."""
    messages = []
    for path in paths:
        with pytest.raises(ValueError, match="schedule") as caught:
            train("1f1b", path)
        messages.append(str(caught.value))
    return messages


def test_a_broken_file_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    wanted = {}
    for with_communication, changes in ((True, BROKEN), (False, BROKEN_ORDERS)):
        for (old, new), word in changes.items():
            path = tmp_path / f"{len(wanted)}.csv"
            order = one_f_one_b_order(2, MICROBATCHES)
            if not with_communication and "1F1" in word:
                order = {**order, 1: gpipe_order(2, MICROBATCHES)[1]}
            dump_csv(order, path, with_communication)
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new, 1))
            wanted[str(path)] = word
    for messages in ranks.run(2, refusals, list(wanted), timeout=30):
        for (path, word), message in zip(wanted.items(), messages, strict=True):
            assert path in message
            assert word in message
