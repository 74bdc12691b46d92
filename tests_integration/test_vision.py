"""Vision-language models: the pipelined model does what the unsplit one does, to 1e-9 in float64.

Gemma-3, whose norms compute in float32 whatever its dtype, is held to 1e-5.

The rows of a batch have no image, one or two, of differing sizes where the model takes them, so no
even cut of the image tensors is right; one microbatch has none at all.
"""

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from harness import RankPool
from oracle import Run, build, compare, run_rank, run_whole
from tiny_vlms import GRID_MODELS, NUM_DEEPSTACK, VLMS, VisionCase

SCHEDULES = ("1f1b", "interleaved_1f1b", "v_schedule")
# Uneven, a stage without layers among them. Features of Qwen3-VL's vision tower enter its first
# layers, which have to be on the first stage.
COUNTS = {"1f1b": (2, 3), "interleaved_1f1b": (2, 0, 1, 2), "v_schedule": (2, 0, 1, 2)}


@cache
def whole(family: str, batch: str) -> Run:
    return run_whole(VisionCase(family, "1f1b", (5,), batch))


def check(ranks: RankPool, case: VisionCase) -> None:
    runs = ranks.run(2, run_rank, case, timeout=120)
    compare(whole(case.family, case.batch), runs, 1e-5 if case.family == "gemma3" else 1e-9)


@pytest.mark.parametrize(
    ("family", "schedule", "batch"),
    [
        *itertools.product(VLMS, SCHEDULES, ("text", "images")),
        *itertools.product(GRID_MODELS, SCHEDULES, ("videos",)),
    ],
)
def test_exact(ranks: RankPool, family: str, schedule: str, batch: str) -> None:
    check(ranks, VisionCase(family, schedule, COUNTS[schedule], batch))


@pytest.mark.parametrize("family", [name for name in VLMS if name != "qwen3_vl"])
def test_first_stage_without_layers(ranks: RankPool, family: str) -> None:
    check(ranks, VisionCase(family, "1f1b", (0, 5), "images"))


@pytest.mark.parametrize("cut", range(NUM_DEEPSTACK))
def test_layers_that_take_image_features_are_on_the_first_stage(ranks: RankPool, cut: int) -> None:
    case = VisionCase("qwen3_vl", "1f1b", (cut, 5 - cut), "images")
    for name, message in ranks.run_expecting_error(2, build_only, case):
        assert name == "ValueError"
        assert f"before layer {cut}" in message
        assert "layers 2, 3, 4, 5" in message


def build_only(case: VisionCase) -> None:
    build(case)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_evaluation(ranks: RankPool, family: str) -> None:
    case = VisionCase(family, "v_schedule", COUNTS["v_schedule"], "images")
    batch = case.inputs(seed=3)
    target = batch.pop("target")
    with torch.no_grad():
        logits = case.model().eval()(**batch, use_cache=False).logits
    losses, logits_of_ranks = zip(*ranks.run(2, evaluate, case, timeout=120), strict=True)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).item(), rel=1e-9
    )
    got = next(each for each in logits_of_ranks if each is not None)
    torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-9)


def evaluate(case: VisionCase) -> Any:
    output = build(case).eval(**case.inputs(seed=3), return_outputs=True)
    assert output.loss is not None
    return output.loss.item(), output.logits


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llava", "images", ("pixel_values has 5 images", "24 image placeholder tokens")),
        ("qwen2_vl", "images", ("pixel_values has 75 rows", "6 images of image_grid_thw", "76")),
        ("qwen2_5_vl", "rows", ("row 0 of input_ids has 7 image", "images 0 to 2", "take 9")),
    ],
)
def test_what_does_not_add_up(
    ranks: RankPool, family: str, change: str, said: tuple[str, ...]
) -> None:
    case = VisionCase(family, "interleaved_1f1b", COUNTS["interleaved_1f1b"], "images")
    for name, message in ranks.run_expecting_error(2, step_changed, case, change):
        assert name == "ValueError"
        for each in said:
            assert each in message


def step_changed(case: VisionCase, change: str) -> None:
    ap = build(case)
    batch = case.inputs(seed=3)
    if change == "images":
        batch["pixel_values"] = batch["pixel_values"][:-1]
    else:
        batch["input_ids"] = batch["input_ids"].flip(0)
    ap.step(**batch)
