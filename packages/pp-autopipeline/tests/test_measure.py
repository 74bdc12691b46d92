"""Measured costs: which parts are run, on what, and the bytes beside the times."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pp_autopipeline import Costs, estimate_costs, init_empty_weights, measure_costs
from pp_split_hf import find_layout

SIZES = {"seq_len": 16, "microbatch_size": 2}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make(model_type: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A model on the meta device."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**SMALL, **overrides})
        )


def measure(model: nn.Module, **options: Any) -> Costs:
    return measure_costs(model, **{"device": "cpu", "repeats": 1, **SIZES, **options})


def parts_of(costs: Costs) -> list[Any]:
    return [costs.first, *costs.layers, costs.last]


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                   "sliding_window": 4, "use_sliding_window": True}),
        ("gpt2", {"intermediate_size": None, "attn_pdrop": 0.0}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_estimate(model_type: str, overrides: dict[str, Any]) -> None:
    model = make(model_type, **overrides)
    measured, estimated = measure(model), estimate_costs(model, **SIZES)
    assert measured.boundary_bytes == estimated.boundary_bytes
    for got, wanted in zip(parts_of(measured), parts_of(estimated), strict=True):
        # Experts also keep where the rows of each end.
        assert got.activation_bytes == pytest.approx(wanted.activation_bytes, rel=1e-3)
        assert got.parameter_bytes == wanted.parameter_bytes
        assert got.forward > 0
        assert got.backward_input + got.backward_weight > 0
    assert measured.first.backward_input == 0
    assert all(parameter.is_meta for parameter in model.parameters())


def count_calls(model: nn.Module) -> list[str]:
    """Have every layer's attention note which layer it is of when it runs on real tensors."""
    calls: list[str] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if type(kwargs["hidden_states"]) is torch.Tensor:
                calls.append(name)

        return hook

    for index, layer in enumerate(model.model.layers):  # type: ignore[arg-type]
        layer.self_attn.register_forward_pre_hook(note(str(index)), with_kwargs=True)
    return calls


def test_one_layer_of_a_kind_is_run() -> None:
    model = make("qwen3", layer_types=["full_attention", "sliding_attention", "full_attention"],
                 sliding_window=4, use_sliding_window=True)  # fmt: skip
    calls = count_calls(model)
    costs = measure(model, repeats=2)
    assert calls == ["0"] * 3 + ["1"] * 3  # once more, for what does not count
    assert costs.layers[0] == costs.layers[2] != costs.layers[1]


def test_what_is_frozen_is_another_kind() -> None:
    model = make()
    model.get_submodule("model.layers.1").requires_grad_(False)
    calls = count_calls(model)
    costs = measure(model)
    assert calls == ["0"] * 2 + ["1"] * 2
    assert costs.layers[0].parameter_bytes == 4 * costs.layers[1].parameter_bytes
    assert costs.layers[0].activation_bytes > costs.layers[1].activation_bytes


def test_weights_that_are_there_are_used_and_stay() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    before = {name: p.clone() for name, p in model.named_parameters()}
    random = torch.random.get_rng_state()
    measure(model)
    assert torch.equal(torch.random.get_rng_state(), random)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_layers_whose_work_depends_on_values_can_be_measured() -> None:
    class RoutedByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            for expert, chosen in zip(self.experts, (x[..., 0] > 0, x[..., 0] <= 0), strict=True):
                y[chosen] = expert(x[chosen])
            return y

    model = make()
    with init_empty_weights():
        model.get_submodule("model.layers.1").mlp = RoutedByHand()
    costs = measure(model)
    assert all(part.forward > 0 and part.activation_bytes > 0 for part in parts_of(costs))
    plain, by_hand = costs.layers[:2]
    assert by_hand.parameter_bytes < plain.parameter_bytes


def test_layers_that_stay_with_a_vision_tower() -> None:
    model = make()
    layout = find_layout(model)
    first, *others = layout.trace.crossings
    tied = (replace(first, problem="images"), *others)
    layout = replace(layout, trace=replace(layout.trace, crossings=tied))
    assert measure(model, layout=layout).first.activation_bytes > 0


def test_dtype_and_json(tmp_path: Path) -> None:
    costs = measure(make(), dtype=torch.bfloat16)
    assert costs.boundary_bytes == 2 * 2 * 16 * 32
    costs.to_json(tmp_path / "costs.json")
    assert Costs.from_json(tmp_path / "costs.json") == costs


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="seq_len=0"):
        measure(make(), seq_len=0)
    with pytest.raises(ValueError, match="repeats=0"):
        measure(make(), repeats=0)
