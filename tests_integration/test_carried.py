"""Architectures whose layers take more than hidden states, in training on several ranks.

Embeddings, per-layer inputs, keys and values, router states and indices cross the boundaries
beside the hidden states, or hidden states have an odd shape, or layers must stay together. On four
ranks all schedules run with `PP_ALL_ARCHITECTURES=1`, else one for each architecture.
"""

import math
import os
from functools import cache

import pytest
import torch
from architectures import ROWS, make_model
from harness import RankPool
from oracle import Case, Run, compare, run_rank, run_whole

from pp_split_hf import find_layout

CARRIED = (
    "cpmant", "gemma3n_text", "gemma4_text", "glm_moe_dsa", "hy_v4", "inkling2_text",
    "inkling2_loop_text", "zamba", "zamba2",
)  # fmt: skip
ODD = ("deepseek_v4", "dory", "openai-gpt", "qwen4_exp")
NAMES = [name for name in (*CARRIED, *ODD) if name in ROWS]
# Compute in float32 here and there whatever the model's dtype, and take no other.
FLOAT32 = ("dory", "inkling2_text", "inkling2_loop_text")
# Does so too, and takes float64 where it does not.
PARTLY_FLOAT32 = ("gemma4_text",)
# The fused experts know no float64.
EAGER_EXPERTS = ("glm_moe_dsa", "hy_v4", "deepseek_v4")


def make_case(name: str, schedule: str, num_stages: int) -> Case:
    """Stages as uneven as the places allow at which the model can be cut, some of them empty."""
    cuts = find_layout(make_model(ROWS[name])).trace.cuts
    ends = [
        cuts[math.ceil((i + 1) ** 0.8 / num_stages**0.8 * (len(cuts) - 1))]
        for i in range(num_stages)
    ]
    counts = tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    kind = "padded" if ROWS[name]["takes_position_ids"] else "plain"
    overrides = {"experts_implementation": "eager"} if name in EAGER_EXPERTS else {}
    return Case(name, schedule, counts, kind, dtype=dtype, overrides=overrides, by_microbatch=True)


@cache
def whole(name: str) -> Run:
    return run_whole(make_case(name, "1f1b", 1))


SCHEDULES = ("1f1b", "interleaved_1f1b", "v_schedule")
CASES = [(name, schedule, 2) for name in NAMES for schedule in SCHEDULES]
if os.environ.get("PP_ALL_ARCHITECTURES"):
    CASES += [(name, schedule, 4) for name in NAMES for schedule in SCHEDULES]
else:  # each architecture once, the schedules in turn
    CASES += [(name, SCHEDULES[i % 3], 4) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "schedule", "world_size"), CASES)
def test_exact(ranks: RankPool, name: str, schedule: str, world_size: int) -> None:
    case = make_case(name, schedule, world_size * (1 if schedule == "1f1b" else 2))
    runs = ranks.run(world_size, run_rank, case, timeout=180)
    compare(whole(name), runs, 1e-5 if name in (*FLOAT32, *PARTLY_FLOAT32) else 1e-9)
