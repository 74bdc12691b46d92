"""Which rows each rank gets, and what is said where ranks of a pipeline get different ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from harness import RankPool
from oracle import Case, build, token_mean
from tiny_models import tiny_model
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from pp_autopipeline import AutoPipeline, DataParallelSampler, ParallelSizes, build_mesh

CASE = Case("llama", "1f1b", (1, 1, 1), "padded")
CHECKED = replace(CASE, options={"check_batches": True})
ROWS = 40


def draw_and_train() -> tuple[int, list[list[int]], list[float]]:
    """This rank's replica, the rows it drew in two epochs, and the losses of training on them."""
    mesh = build_mesh(ParallelSizes(pp_size=2, dp_size=2), device_type="cpu").world_mesh
    ap = AutoPipeline(mesh, pp_microbatch_size=2, pp_batch_size=4, check_batches=True)
    ap.build(tiny_model("llama", 2), loss_fn=token_mean)
    batch = make_batch("padded", ROWS)
    data = [{name: rows[index] for name, rows in batch.items()} for index in range(ROWS)]
    numbered = [(index, row) for index, row in enumerate(data)]
    sampler = DataParallelSampler(numbered, mesh, seed=7)
    loader = DataLoader(numbered, batch_size=4, sampler=sampler, drop_last=True)  # type: ignore[arg-type,var-annotated]
    epochs, losses = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rows = []
        for numbers, inputs in loader:
            rows += numbers.tolist()
            losses.append(ap.step(**inputs).loss.item())
        epochs.append(rows)
    return mesh["dp"].get_local_rank(), epochs, losses


def test_every_rank_of_a_replica_gets_its_rows(ranks: RankPool) -> None:
    replicas: dict[int, list[Any]] = {0: [], 1: []}
    for replica, epochs, losses in ranks.run(4, draw_and_train):
        assert len(losses) == 2 * ROWS // 8
        replicas[replica].append((epochs, losses))
    for first, second in replicas.values():
        assert first == second
    for one, other in zip(replicas[0][0][0], replicas[1][0][0], strict=True):
        assert sorted(one + other) == list(range(ROWS))
    first_epoch, second_epoch = replicas[0][0][0]
    assert first_epoch != second_epoch


def differing(kind: str) -> dict[str, Any]:
    """A batch that on rank 1 differs in one thing."""
    batch = make_batch("padded", CASE.rows)
    if dist.get_rank() != 1:
        return batch
    if kind == "ids":
        batch["input_ids"] = batch["input_ids"].flip(0)
    elif kind == "target":
        batch["target"][-1, -1] += 1
    elif kind == "mask":
        batch["attention_mask"][0, 0] = 1 - batch["attention_mask"][0, 0]
    elif kind == "length":
        batch = {name: value[:, :-2] for name, value in batch.items()}
    elif kind == "dtype":
        batch["attention_mask"] = batch["attention_mask"].int()
    elif kind == "missing":
        del batch["attention_mask"]
    return batch


def refused(kind: str) -> list[str]:
    """What `step` and `eval` say of a batch that differs, between batches that do not."""
    ap = build(CHECKED)
    good = make_batch("padded", CASE.rows)
    before = ap.step(**good).loss
    said = []
    for call in (ap.step, ap.eval):
        with pytest.raises(ValueError, match="given different batches") as refusal:
            call(**differing(kind))
        said.append(str(refusal.value))
    assert torch.equal(ap.step(**good).loss, before)
    return said


OTHER_VALUES = (
    "is [8, 8] torch.int64 on pipeline ranks 0, 2; "
    "[8, 8] torch.int64 with other values on pipeline rank 1"
)
OTHER_LENGTH = "is [8, 8] torch.int64 on pipeline ranks 0, 2; [8, 6] torch.int64 on pipeline rank 1"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("ids", [f"input_ids {OTHER_VALUES}"]),
        ("target", [f"target {OTHER_VALUES}"]),
        ("mask", [f"attention_mask {OTHER_VALUES}"]),
        (
            "length",
            [f"{name} {OTHER_LENGTH}"
             for name in ("input_ids", "target", "attention_mask", "position_ids")],
        ),
        (
            "dtype",
            ["attention_mask is [8, 8] torch.int64 on pipeline ranks 0, 2; "
             "[8, 8] torch.int32 on pipeline rank 1"],
        ),
        (
            "missing",
            ["attention_mask is [8, 8] torch.int64 on pipeline ranks 0, 2; "
             "not given on pipeline rank 1"],
        ),
    ],
)  # fmt: skip
def test_different_batches_are_refused_on_all_ranks(
    ranks: RankPool, kind: str, wanted: list[str]
) -> None:
    for said in ranks.run(3, refused, kind):
        for message in said:
            assert [line.strip() for line in message.splitlines()[1:]] == wanted


def step_and_eval() -> None:
    ap = build(CHECKED)
    (ap.step if dist.get_rank() else ap.eval)(**make_batch("padded", CASE.rows))


def test_step_on_one_rank_and_eval_on_another(ranks: RankPool) -> None:
    for name, message in ranks.run_expecting_error(3, step_and_eval):
        assert name == "ValueError"
        assert "the call is 'eval' on pipeline rank 0; 'step' on pipeline ranks 1, 2" in message


def check_on_one_rank() -> None:
    build(CHECKED if dist.get_rank() == 1 else CASE).step(**make_batch("padded", CASE.rows))


def test_the_check_on_one_rank_alone(ranks: RankPool) -> None:
    for name, message in ranks.run_expecting_error(3, check_on_one_rank):
        assert name == "ValueError"
        assert "check_batches of pipeline ranks 1 differ from rank 0's" in message


def gathers(checked: bool) -> tuple[int, float]:
    """How often a step that is not the first gathers from all ranks; and its loss."""
    ap = build(CHECKED if checked else CASE)
    batch = make_batch("padded", CASE.rows)
    ap.step(**batch)
    if not checked and dist.get_rank() == 0:
        batch["target"] = batch["target"].flip(0)  # which only the last stage looks at
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss = ap.step(**batch).loss
    count = sum(event.count for event in profiled.key_averages() if "all_gather" in event.key)
    return count, loss.item()


def test_without_the_check_nothing_is_sent_for_it(ranks: RankPool) -> None:
    with_check, without = ranks.run(3, gathers, True), ranks.run(3, gathers, False)
    assert all(count > 0 for count, _ in with_check)
    assert all(count == 0 for count, _ in without)
    assert {loss for _, loss in with_check} == {loss for _, loss in without}
