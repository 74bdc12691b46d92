"""How many layers each stage gets, without ranks."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from pp_autopipeline import AutoPipeline, Costs, PipelineConfig, estimate_costs
from pp_autopipeline.layer_counts import choose_layer_counts, describe_balance
from pp_schedule import LayerCosts
from pp_split_hf import find_layout, plan_stage_fqns

Llama = Callable[..., PreTrainedModel]
ONE = LayerCosts(1, 1, 1)
CONFIG = PipelineConfig(pp_batch_size=4)


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def costs_of(*layers: float, first: float = 0.0, last: float = 0.0) -> Costs:
    return Costs([LayerCosts(x) for x in layers], LayerCosts(first), LayerCosts(last))


def test_only_where_the_model_can_be_cut(llama: Llama) -> None:
    model = llama(6)
    layout = find_layout(model)
    ids = {rank: (rank,) for rank in range(3)}
    costs = costs_of(1, 1, 1, 1, 1, 1, last=3)

    def counts(*cuts: int) -> tuple[int, ...]:
        crossings = tuple(
            crossing if index in cuts else replace(crossing, problem="because")
            for index, crossing in enumerate(layout.trace.crossings)
        )
        there = replace(layout, trace=replace(layout.trace, crossings=crossings))
        found, report = choose_layer_counts(model, there, ids, CONFIG, costs)
        assert report is not None
        assert report.layer_counts == found
        return found

    assert counts(0, 1, 2, 3, 4, 5, 6) == (3, 3, 0)
    assert counts(0, 1, 2, 4, 5, 6) == (4, 2, 0)
    assert counts(2, 4, 5, 6) == (4, 2, 0)
    assert counts(0, 1, 2, 3, 4, 5) == (3, 2, 1)


@pytest.mark.parametrize(
    ("ids", "counts"),
    [
        ({0: (0,), 1: (1,)}, (3, 1)),
        ({0: (1,), 1: (0,)}, (3, 1)),
        ({0: (0, 2), 1: (1, 3)}, None),
        ({0: (0, 3), 1: (1, 2)}, None),
    ],
)
def test_the_work_of_a_rank_is_that_of_all_its_stages(
    llama: Llama, ids: dict[int, tuple[int, ...]], counts: tuple[int, ...] | None
) -> None:
    model = llama(4)
    costs = costs_of(1, 1, 1, 1, last=2)
    found, report = choose_layer_counts(model, find_layout(model), ids, CONFIG, costs)
    assert report is not None
    assert report.rank_loads == (3, 3)
    assert counts in (None, found)
    lines = describe_balance(report, ids, "seconds")
    assert "1.00 x its ideal share" in lines[0]
    assert "3 seconds per microbatch; ideal 3, spread evenly 4" in lines[1]


def test_a_placement_that_cannot_be_weighed(llama: Llama) -> None:
    model = llama(4)
    for ids in ({0: (0, 1), 1: (2, 3)}, {0: (0, 1), 1: (2,)}):
        with pytest.raises(ValueError, match=r"pp_schedule_csv.*balance='layers'"):
            choose_layer_counts(model, find_layout(model), ids, CONFIG, costs_of(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, {"seq_len": 64, "microbatch_size": 1}),
        ({"pp_seq_len": 16, "pp_microbatch_size": 2}, {"seq_len": 16, "microbatch_size": 2}),
    ],
)
def test_the_microbatch_that_is_weighed(
    llama: Llama, config: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model = llama(3)
    ids = {0: (0,), 1: (1,)}
    settings = PipelineConfig(pp_batch_size=4, **config)
    _, report = choose_layer_counts(model, find_layout(model), ids, settings, "cost")
    costs = estimate_costs(model, **wanted)
    assert report is not None
    assert sum(report.rank_loads) == pytest.approx(
        sum(part.work for part in (costs.first, *costs.layers, costs.last))
    )


def test_by_default_layers_count(mesh: DeviceMesh, llama: Llama) -> None:
    ap = AutoPipeline(mesh, pp_batch_size=2).build(llama(2), loss_fn=token_mean)
    assert ap.balance_report is None
    assert "split by cost" not in ap.debug_summary()


def test_layers_per_stage_tells_the_number_of_stages(mesh: DeviceMesh, llama: Llama) -> None:
    ap = AutoPipeline(
        mesh, pp_batch_size=2, pp_schedule="interleaved_1f1b", layers_per_stage=2, balance="cost"
    ).build(llama(6), loss_fn=token_mean)
    assert len(ap.stage_summaries) == 3
    assert ap.balance_report is not None
    assert ap.balance_report.ratio == 1  # one rank has it all
    assert "heaviest: pipeline rank 0 (stages 0, 1, 2)" in ap.debug_summary()


def test_a_schedule_file_is_weighed_too(mesh: DeviceMesh, llama: Llama, tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0F0,1F0,1B0,0B0\n")
    ap = AutoPipeline(
        mesh, pp_schedule_csv=str(path), pp_schedule=None, balance=costs_of(1, 1, 1, last=2)
    ).build(llama(3), loss_fn=token_mean)
    assert ap.balance_report is not None
    assert "in the unit of the costs" in ap.debug_summary()


@pytest.mark.parametrize(
    ("balance", "words"),
    [
        ("costs", ["balance='costs'", "did you mean 'cost'?"]),
        ("Layer", ["balance='Layer'", "did you mean 'layers'?"]),
        ("even", ["balance='even'", "'layers', 'cost' or pp_schedule.Costs"]),
        (None, ["balance=None"]),
        ([1, 2], ["balance=[1, 2]"]),
    ],
)
def test_wrong_values(mesh: DeviceMesh, balance: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="AutoPipeline cannot be made") as caught:
        AutoPipeline(mesh, balance=balance)
    assert all(word in str(caught.value) for word in words)


def test_costs_of_another_model(mesh: DeviceMesh, llama: Llama) -> None:
    ap = AutoPipeline(mesh, balance=costs_of(1, 1))
    with pytest.raises(ValueError, match="costs of 2 layers, but LlamaForCausalLM has 3"):
        ap.build(llama(3), loss_fn=token_mean)


def test_costs_that_cannot_be_estimated(mesh: DeviceMesh, llama: Llama) -> None:
    class ChosenByHand(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).masked_scatter(x > 0, super().forward(x[x.sum(-1) > 0]))

    model = llama(2)
    model.get_submodule("model.layers.0").mlp = ChosenByHand(32, 32).double()
    with pytest.raises(ValueError, match=r"balance='cost': cannot count.*measure_costs"):
        AutoPipeline(mesh, balance="cost").build(model, loss_fn=token_mean)


def test_a_list_of_modules_leaves_nothing_to_decide(
    mesh: DeviceMesh, llama: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(2)
    plan = plan_stage_fqns(find_layout(model), [2])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ap = AutoPipeline(mesh, module_fqns_per_model_part=plan, balance="cost")
            ap.build(model, loss_fn=token_mean)
    said = [r.message for r in caplog.records if "balance='cost' has no effect" in r.message]
    assert len(said) == 1
    assert ap.balance_report is None
