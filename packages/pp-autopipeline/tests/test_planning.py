from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pp_autopipeline import estimate_costs, init_empty_weights
from pp_autopipeline.planning import expand_counts, merge_layers, plan_model
from pp_schedule import Costs, LayerCosts, load_csv, resolve_schedule
from pp_split_hf import check_stage_fqns, find_layout

SIZES = {"batch_size": 8, "effort": 0.1}


def tiny_llama(num_layers: int = 6) -> PreTrainedModel:
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        tie_word_embeddings=False,
    )
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def costs_of(model: PreTrainedModel) -> Costs:
    return estimate_costs(model, seq_len=32).in_seconds(1e9)


def test_a_plan_speaks_of_the_model(tmp_path: Path) -> None:
    model = tiny_llama()
    found = plan_model(model, 4, costs=costs_of(model), **SIZES)
    assert sum(found.layer_counts) == 6
    assert check_stage_fqns(find_layout(model), found.stage_fqns, model) == []
    assert found.best.microbatch_size * found.best.num_microbatches == 8
    path = tmp_path / "schedule.csv"
    found.plan.dump_csv(path)
    settings = found.settings(path)
    assert settings["module_fqns_per_model_part"] == found.stage_fqns
    if found.needs_csv:
        assert "pp_schedule" not in settings
        assert len(load_csv(settings["pp_schedule_csv"])) == 4
        with pytest.raises(ValueError, match="has no name in torch"):
            found.settings()
    else:
        assert resolve_schedule(settings["pp_schedule"])


def test_costs_may_be_those_of_each_microbatch_size() -> None:
    model = tiny_llama()
    costs = costs_of(model)
    found = plan_model(model, 2, costs={4: costs}, **SIZES)
    assert (found.best.microbatch_size, found.best.num_microbatches) == (4, 2)
    found = plan_model(model, 2, costs=costs, microbatch_size=2, **SIZES)
    assert (found.best.microbatch_size, found.best.num_microbatches) == (2, 4)


def test_layers_that_no_cut_parts_stay_together() -> None:
    layers = [LayerCosts(float(2**index), 0.0, 0.0, 1.0, 1.0) for index in range(6)]
    costs = Costs(layers, first=LayerCosts(100.0), last=LayerCosts(200.0))
    cuts = (1, 2, 5)
    merged = merge_layers(costs, cuts)
    assert [layer.forward for layer in merged.layers] == [2.0, 4.0 + 8.0 + 16.0]
    assert merged.layers[1].activation_bytes == 3.0
    assert (merged.first.forward, merged.last.forward) == (101.0, 232.0)
    assert expand_counts((1, 1), cuts, 6) == (2, 4)
    assert expand_counts((0, 2, 0), cuts, 6) == (1, 4, 1)
    assert sum(expand_counts((2, 0), cuts, 6)) == 6


def test_everything_that_is_wrong_is_said_at_once() -> None:
    model = tiny_llama()
    costs = costs_of(tiny_llama(5))
    with pytest.raises(ValueError, match="cannot plan: ") as error:
        plan_model(model, 4, costs=costs, batch_size=8, microbatch_size=3)
    assert "costs has 5 layers, but LlamaForCausalLM has 6" in str(error.value)
    assert "microbatch_size=3 does not divide batch_size=8" in str(error.value)
