import json
import math
from pathlib import Path

import pytest

from pp_schedule import Costs, LayerCosts, balance

LAYER = LayerCosts(1.0, 1.5, 0.5, activation_bytes=10, parameter_bytes=100)
EMBEDDING = LayerCosts(0.1, 0.0, 0.2, activation_bytes=1, parameter_bytes=50)
HEAD = LayerCosts(2.0, 2.0, 2.0, activation_bytes=40, parameter_bytes=60)


def model(num_layers: int = 5) -> Costs:
    return Costs(
        [LAYER] * num_layers,
        EMBEDDING,
        HEAD,
        boundary_bytes=7,
        kept_for_weight=0.8,
        latency=0.01,
        bandwidth=1000.0,
    )


def test_stages_sum_their_layers_and_the_ends() -> None:
    stages = model().for_stages([3, 2, 0])
    assert stages.forward == pytest.approx([3.1, 2.0, 2.0])
    assert stages.backward_input == pytest.approx([4.5, 3.0, 2.0])
    assert stages.backward_weight == pytest.approx([1.7, 1.0, 2.0])
    assert stages.activation_bytes == [31, 20, 40]
    assert stages.parameter_bytes == [350, 200, 60]
    assert (stages.boundary_bytes, stages.kept_for_weight) == (7, 0.8)
    assert (stages.latency, stages.bandwidth) == (0.01, 1000.0)


def test_one_stage_has_both_ends() -> None:
    assert model(2).for_stages([2]).forward == pytest.approx([4.1])


def test_layers_go_to_stages_in_their_order() -> None:
    layers = [LayerCosts(forward=float(index)) for index in range(4)]
    assert Costs(layers).for_stages([1, 0, 3]).forward == [0, 0, 6]


@pytest.mark.parametrize(
    ("counts", "problem"),
    [([2, 2], "sum to 4, but the model has 5 layers"), ([6, -1], "-1 layers on stage 1")],
)
def test_counts_that_are_not_the_models(counts: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        model().for_stages(counts)


def test_work_in_seconds() -> None:
    costs = model().in_seconds(work_per_second=10.0)
    assert costs.layers[0].forward == pytest.approx(0.1)
    assert costs.last.work == pytest.approx(0.6)
    assert costs.first.parameter_bytes == 50
    assert (costs.latency, costs.bandwidth) == (0.01, 1000.0)


def test_balance_of_a_model() -> None:
    costs = model(8)
    works = [layer.work for layer in costs.layers]
    assert balance(works, costs.first.work, costs.last.work, 4) == (2, 3, 3, 0)


@pytest.mark.parametrize("costs", [model(), Costs([LAYER])])
def test_json_gives_back_what_it_got(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs.to_json(path)
    assert Costs.from_json(path) == costs
    json.loads(path.read_text(), parse_constant=pytest.fail)  # it is JSON for everyone


def test_json_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"num_layers": 3, "layers": [{"forward": 2}], "last": {"forward": 5}}')
    costs = Costs.from_json(path)
    assert costs == Costs([LayerCosts(forward=2)] * 3, last=LayerCosts(forward=5))
    assert math.isinf(costs.bandwidth)


def test_json_names_all_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    content = {
        "num_layers": 3,
        "layers": [{"forward": 1, "flops": 2}, {"backward_input": "fast"}],
        "head": {},
        "last": {"parameter_bytes": -5},
        "first": [1],
        "latency": True,
    }
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="holds no costs") as error:
        Costs.from_json(path)
    for part in (
        "there is no field layers[0].flops",
        "layers[1].backward_input must be a number, not 'fast'",
        "layers has 2 entries, but num_layers is 3",
        "there is no field head; known: bandwidth",
        "last.parameter_bytes -5 must be a finite number, 0 or more",
        "first must be an object, not [1]",
        "latency must be a number, not True",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"layers": 4}', '{"layers": [], "num_layers": 0}'])
def test_json_without_layers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no costs"):
        Costs.from_json(path)


def test_numbers_out_of_range_are_named_together() -> None:
    with pytest.raises(ValueError, match="no costs of a model") as error:
        Costs([LAYER, LayerCosts(forward=math.nan)], bandwidth=0, latency=-1.0)
    for part in ("layers[1].forward nan", "bandwidth 0", "latency -1.0"):
        assert part in str(error.value)
