"""What the planner finds trains as the unsplit model does: any split, any order, from its own file."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from oracle import Case, Run, compare, run_rank, run_whole
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh

from pp_autopipeline import AutoPipeline, estimate_costs
from pp_autopipeline.planning import plan_model
from pp_schedule import Candidate, Costs, LayerCosts, dump_csv, plan

LAYERS = 6
ROWS, MICROBATCH_SIZE = 12, 1
# Nothing alike: every layer costs something else, and the head a lot.
COSTS = Costs(
    [LayerCosts(1.0 + i % 3, 1.2, 0.5 + i % 2, 1.0 + i / 6, 1.0) for i in range(LAYERS)],
    first=LayerCosts(0.3, 0.0, 0.3, 0.5, 2.0),
    last=LayerCosts(2.0, 2.5, 2.0, 2.0, 2.0),
    boundary_bytes=0.1,
    latency=0.1,
    bandwidth=1.0,
    overhead=0.02,
    split_factor=1.05,
)


@cache
def whole(family: str) -> Run:
    return run_whole(Case(family, "1f1b", (LAYERS,), "padded", ROWS, MICROBATCH_SIZE))


def candidates(pp_size: int, memory: float) -> list[Candidate]:
    """The best of each kind, in a share of the memory that the plan without a limit takes."""
    free = plan(COSTS, pp_size, ROWS // MICROBATCH_SIZE, effort=0.1)
    limit = memory * max(free.baseline.peak_memory)
    found = plan(COSTS, pp_size, ROWS // MICROBATCH_SIZE, memory_limit=limit, effort=0.1)
    assert found.best.fits
    return [found.best, *(c for c in found.candidates if c.schedule == "own" and c.fits)]


@pytest.mark.parametrize(
    ("pp_size", "family", "memory"),
    [(2, "llama", 0.9), (2, "llama", 2.0), (4, "qwen3", 0.9), (4, "gpt2", 2.0)],
)
def test_every_plan_is_exact(
    ranks: RankPool, pp_size: int, family: str, memory: float, tmp_path: Path
) -> None:
    tried = candidates(pp_size, memory)
    assert any(candidate.schedule == "own" for candidate in tried)
    for number, candidate in enumerate(tried):
        path = tmp_path / f"{number}.csv"
        dump_csv(candidate.order, path)
        case = Case(
            family,
            "1f1b",
            candidate.layer_counts,
            "padded",
            ROWS,
            MICROBATCH_SIZE,
            options={"pp_schedule_csv": str(path)},
        )
        compare(whole(family), ranks.run(pp_size, run_rank, case, timeout=120), 1e-9)


def train_as_planned(memory: float, folder: str) -> tuple[dict[str, Any], float]:
    """Plan on every rank by itself, and train one step with the settings found."""
    model = tiny_model("llama", LAYERS, torch.float64)
    costs = estimate_costs(model, seq_len=16)
    pp_size = torch.distributed.get_world_size()
    found = plan_model(
        model,
        pp_size,
        costs=costs.in_seconds(1e9),
        batch_size=ROWS,
        memory_limit=memory,
        microbatch_size=MICROBATCH_SIZE,
        effort=0.1,
    )
    path = f"{folder}/{torch.distributed.get_rank()}.csv"
    found.plan.dump_csv(path)
    settings = found.settings(path)
    mesh = init_device_mesh("cpu", (pp_size,), mesh_dim_names=("pp",))
    case = Case("llama", "1f1b", (LAYERS,), "padded", ROWS, MICROBATCH_SIZE)
    ap = AutoPipeline(mesh, **settings).build(model, loss_fn=token_mean)
    loss = ap.step(**case.inputs(seed=5)).loss
    assert loss is not None
    text = Path(path).read_text()
    return {**settings, "pp_schedule_csv": text}, loss.item()


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100
    )


@pytest.mark.parametrize("pp_size", [2, 4])
def test_ranks_that_plan_alone_agree(ranks: RankPool, pp_size: int, tmp_path: Path) -> None:
    results = ranks.run(pp_size, train_as_planned, 1e12, str(tmp_path), timeout=120)
    for settings, loss in results:
        assert settings == results[0][0]
        assert loss == pytest.approx(whole("llama").losses[0], rel=1e-9)


@pytest.mark.parametrize("balance", ["layers", COSTS])
@pytest.mark.parametrize(("pp_size", "family"), [(2, "qwen3"), (4, "llama")])
def test_auto_is_exact(ranks: RankPool, pp_size: int, family: str, balance: Any) -> None:
    case = Case(family, "auto", (LAYERS,), "padded", ROWS, MICROBATCH_SIZE, balance=balance)
    compare(whole(family), ranks.run(pp_size, run_rank, case, timeout=180), 1e-9)


def test_auto_runs_the_stages_it_is_given(ranks: RankPool) -> None:
    case = Case("llama", "auto", (2, 0, 3, 1), "padded", ROWS, MICROBATCH_SIZE)
    compare(whole("llama"), ranks.run(2, run_rank, case, timeout=180), 1e-9)
