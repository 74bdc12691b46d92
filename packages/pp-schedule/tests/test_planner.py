import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import pp_schedule
from pp_schedule import (
    SCHEDULE_NAMES,
    Costs,
    LayerCosts,
    load_csv,
    named_order,
    resolve_schedule,
    simulate,
    validate_order,
)
from pp_schedule.balancing import even_counts
from pp_schedule.planner.splits import placements, splits

plan = partial(pp_schedule.plan, effort=0.1)
H100 = 4e14  # FLOPs per second that a large product reaches


@dataclass(frozen=True)
class Model:
    """Dimensions of a decoder with gated feed-forward and grouped attention."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def costs(self, seq_len: int = 4096) -> Costs:
        """One row in bfloat16, trained with AdamW, in seconds."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)
        product, attention = 2 * weights * seq_len, 4 * seq_len**2 * queries
        kept = 5 * self.hidden + 2 * queries + 2 * keys + 4 * self.intermediate
        layer = LayerCosts(
            product + attention,
            product + 2.5 * attention,
            product,
            2 * seq_len * kept,
            8 * (weights + 2 * self.hidden),
        )
        table = self.hidden * self.vocabulary
        logits = 2 * table * seq_len
        head = LayerCosts(logits, logits, logits, 4 * seq_len * self.vocabulary, 8 * table)
        costs = Costs(
            [layer] * self.layers,
            first=LayerCosts(parameter_bytes=8 * table),
            last=head,
            boundary_bytes=2 * seq_len * self.hidden,
        )
        return costs.in_seconds(H100)


QWEN_0_5B = Model(896, 4864, 24, 14, 2, 64, 151_936)
LLAMA_1B = Model(2048, 8192, 16, 32, 8, 64, 128_256)
QWEN_8B = Model(4096, 12_288, 36, 32, 8, 128, 151_936)
LLAMA_8B = Model(4096, 14_336, 32, 32, 8, 128, 128_256)
LLAMA_70B = Model(8192, 28_672, 80, 64, 8, 128, 128_256)
SMALL = Costs(
    [LayerCosts(1.0, 1.2, 0.8, 3.0, 2.0)] * 10,
    first=LayerCosts(parameter_bytes=4.0),
    last=LayerCosts(2.0, 2.0, 2.0, 4.0, 4.0),
    boundary_bytes=0.5,
    latency=0.05,
    bandwidth=10.0,
)


def even_1f1b(costs: Costs, pp_size: int, m: int) -> tuple[float, float]:
    """Step time, and memory of the rank that needs most, of 1F1B with an even split."""
    stages = costs.for_stages(even_counts(len(costs.layers), pp_size))
    timeline = simulate(named_order("1f1b", pp_size, pp_size, m), stages)
    return timeline.makespan, max(timeline.peak_memory)


@pytest.mark.parametrize(
    ("model", "pp_size", "m", "speed_up"),
    [
        (LLAMA_1B, 4, 8, 1.51),
        (QWEN_8B, 8, 16, 1.52),
        (LLAMA_8B, 4, 16, 1.20),
        (LLAMA_70B, 8, 32, 1.13),
    ],
)
def test_in_the_memory_of_1f1b_it_is_faster(
    model: Model, pp_size: int, m: int, speed_up: float
) -> None:
    costs = model.costs()
    time, memory = even_1f1b(costs, pp_size, m)
    found = plan(costs, pp_size, m, memory_limit=memory)
    assert found.best.fits
    assert time / found.best.step_time >= speed_up
    assert found.best.step_time <= 1.08 * found.best.lower_bound
    assert found.baseline.step_time == pytest.approx(time)
    assert (
        max(simulate(found.order, costs.for_stages(found.best.layer_counts)).peak_memory) <= memory
    )


@pytest.mark.parametrize("pp_size", [2, 4, 8])
@pytest.mark.parametrize(("memory", "gap"), [(1.0, 1.08), (1.5, 1.03)])
def test_it_comes_near_to_what_is_possible(pp_size: int, memory: float, gap: float) -> None:
    layer = LayerCosts(1.0, 1.1, 0.7, activation_bytes=1.0)
    costs = Costs(
        [layer] * (6 * pp_size), last=LayerCosts(2.0, 2.0, 2.0), latency=0.05, overhead=0.01
    )
    m = 4 * pp_size
    _, needed = even_1f1b(costs, pp_size, m)
    found = plan(costs, pp_size, m, memory_limit=memory * needed)
    fastest = min((c for c in found.candidates if c.fits), key=lambda c: c.step_time)
    assert fastest.step_time <= gap * fastest.lower_bound
    assert found.best.expected_time <= 1.031 * min(
        c.expected_time for c in found.candidates if c.fits
    )


@pytest.mark.parametrize("memory", [0.8, 1.5])
@pytest.mark.parametrize(("pp_size", "m"), [(1, 2), (2, 3), (4, 8)])
def test_it_is_never_worse_than_the_best_named_schedule(
    pp_size: int, m: int, memory: float
) -> None:
    _, needed = even_1f1b(SMALL, pp_size, m)
    limit = memory * needed
    times = []
    for placement in placements(pp_size, len(SMALL.layers), 2):
        for counts in splits(SMALL, placement):
            for spec in {resolve_schedule(name) for name in SCHEDULE_NAMES}:
                num_stages = placement.num_stages
                if spec.style != placement.style or spec.check(pp_size, num_stages, m):
                    continue
                order = named_order(spec, pp_size, num_stages, m)
                timeline = simulate(order, SMALL.for_stages(counts))
                if max(timeline.peak_memory) <= limit:
                    times.append(timeline.makespan)
    found = plan(SMALL, pp_size, m, memory_limit=limit, jitter=0.0)
    if times:
        assert found.best.fits
        assert found.best.step_time <= min(times) * (1 + 1e-9)


def test_candidates_are_ranked_and_the_losers_are_told_why() -> None:
    _, needed = even_1f1b(SMALL, 4, 8)
    found = plan(SMALL, 4, 8, memory_limit=needed)
    fitting = [c for c in found.candidates if c.fits]
    assert all(a.expected_time <= b.expected_time for a, b in pairwise(fitting))
    assert found.candidates[: len(fitting)] == tuple(fitting)
    schedules = {c.schedule for c in found.candidates}
    assert {"1f1b", "zbvzerobubble", "dualpipev", "zb_h1", "v_half", "own"} <= schedules
    assert found.why_not(found.best) == ""
    for candidate in found.candidates:
        reason = found.why_not(candidate)
        assert bool(reason) == (candidate is not found.best)
        assert ("over the limit" in reason) == (not candidate.fits)
    text = str(found)
    for part in ("Chosen: ", "lower bound", "for comparison"):
        assert part in text
    assert found.best.bubble_fraction > 0
    assert len(found.best.peak_memory) == 4
    assert found.best.ideal_time < found.best.lower_bound <= found.best.step_time


def test_an_order_without_a_name_must_gain_3_percent() -> None:
    # One stage per rank, halves alike: ZB-H1 is the best there is, and torch has it by name.
    costs = Costs([LayerCosts(1.0, 1.0, 1.0, 1.0)] * 4)
    found = plan(costs, 4, 8, memory_limit=4.0, max_stages_per_rank=1)
    assert found.best.is_named
    # Where no named schedule fits, one without a name is taken.
    found = plan(costs, 4, 8, memory_limit=3.0, max_stages_per_rank=1)
    assert found.best.schedule == "own"
    assert found.best.fits


def test_the_order_runs_and_its_file_is_the_same_in_every_process(tmp_path: Path) -> None:
    _, needed = even_1f1b(SMALL, 4, 8)
    SMALL.to_json(tmp_path / "costs.json")
    limit = 0.7 * needed
    plan(SMALL, 4, 8, memory_limit=limit).dump_csv(tmp_path / "1.csv")
    program = (
        "import sys; from pp_schedule import Costs, plan\n"
        "costs = Costs.from_json(sys.argv[1])\n"
        "found = plan(costs, 4, 8, memory_limit=float(sys.argv[2]), effort=0.1)\n"
        "found.dump_csv(sys.argv[3])"
    )
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "costs.json", str(limit), tmp_path / "2.csv"],
        env={**os.environ, "PYTHONHASHSEED": "2"},
        check=True,
        timeout=120,
    )
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    order = load_csv(tmp_path / "1.csv")
    num_stages = 1 + max(a.stage_index for row in order.values() for a in row if a)
    assert validate_order(order, num_stages, 8) == []


def test_a_limit_that_nothing_meets_gets_the_nearest_and_what_would_help() -> None:
    found = plan(SMALL, 4, 8, memory_limit=3.0)
    assert not found.best.fits
    assert found.best.excess_bytes == min(c.excess_bytes for c in found.candidates)
    assert "nothing found fits" in found.advice[0]
    assert "More ranks, or sharding parameters" in found.advice[0]
    fixed = 2.0 * 3 + 4.0
    found = plan(SMALL, 4, 8, memory_limit=fixed + 3.0)
    assert not found.best.fits
    assert "Activation checkpointing" in found.advice[0]
    found = plan(SMALL, 4, batch_size=8, memory_limit=fixed + 3.0)
    assert found.best.microbatch_size == 1


def test_a_head_that_is_too_large_for_any_split_is_named() -> None:
    found = plan(QWEN_0_5B.costs(), 8, 16)
    assert any("vocabulary-parallel head" in sentence for sentence in found.advice)
    assert any("fewer ranks would help" in sentence for sentence in found.advice)
    assert not plan(LLAMA_70B.costs(), 4, 16).advice


def test_few_microbatches_are_named() -> None:
    layers = Costs([LayerCosts(1.0, 1.0, 1.0)] * 8)
    assert any("more of them" in sentence for sentence in plan(layers, 4, 2).advice)


def test_the_microbatch_size_is_chosen_too() -> None:
    # Without overhead the smallest microbatches idle least; with much, larger ones pay.
    assert plan(SMALL, 4, batch_size=16).best.microbatch_size == 1
    slow = replace(SMALL, overhead=5.0)
    found = plan(slow, 4, batch_size=16)
    assert found.best.microbatch_size > 1
    assert found.best.microbatch_size * found.best.num_microbatches == 16
    # Measured costs say themselves what a size costs: two rows take hardly more than one.
    measured = {1: SMALL, 2: replace(SMALL, overhead=0.1), 3: SMALL}
    assert plan(measured, 4, batch_size=16).best.microbatch_size == 2


def test_costs_of_more_rows() -> None:
    four = SMALL.for_rows(4)
    assert four.layers[0].forward == 4 * SMALL.layers[0].forward
    assert four.last.activation_bytes == 4 * SMALL.last.activation_bytes
    assert four.layers[0].parameter_bytes == SMALL.layers[0].parameter_bytes
    assert four.boundary_bytes == 4 * SMALL.boundary_bytes
    assert (four.latency, four.bandwidth) == (SMALL.latency, SMALL.bandwidth)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="cannot plan: ") as error:
        plan(SMALL, 0, memory_limit=-1.0, effort=0.0)
    for part in (
        "pp_size=0 must be at least 1",
        "memory_limit=-1.0 must be above 0",
        "effort=0.0 must be above 0",
        "give either num_microbatches or batch_size",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no microbatch size of costs \(3\) divides batch_size=8"):
        plan({3: SMALL}, 4, batch_size=8)
    with pytest.raises(ValueError, match="need batch_size"):
        plan({3: SMALL}, 4, 8)
