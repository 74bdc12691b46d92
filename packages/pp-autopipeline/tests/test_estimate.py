"""Estimated costs against closed forms, real runs, and torch's counter on the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from pp_autopipeline import Balance, Costs, estimate_costs, init_empty_weights
from pp_autopipeline.torch_private import flop_counter
from pp_schedule import balance
from pp_split_hf import find_layout

SEQ_LEN, ROWS = 48, 2
TOKENS = SEQ_LEN * ROWS
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LARGE = {
    # Written by hand from the models' published configs: ranks, the limit, what an even split costs.
    "qwen2.5-0.5b": (
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
         "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
         "max_position_embeddings": 32768, "tie_word_embeddings": True},
        4, 1.03, 1.70,
    ),
    "llama-3.2-1b": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
         "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "tie_word_embeddings": True},
        4, 1.02, 1.57,
    ),
    "qwen3-8b": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36,
         "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False},
        8, 1.04, 1.43,
    ),
}  # fmt: skip


def make(model_type: str = "llama", **overrides: Any) -> Any:
    """A model on the meta device; of the small sizes, unless all are given."""
    settings = {**SMALL, **overrides} if "intermediate_size" not in overrides else overrides
    config = AutoConfig.for_model(model_type, **settings)
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


def make_real(model_type: str = "llama", **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    return AutoModelForCausalLM.from_config(config)


def estimate(model: nn.Module, **options: Any) -> Costs:
    return estimate_costs(model, **{"seq_len": SEQ_LEN, "microbatch_size": ROWS, **options})


def matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.ndim == 2)


def causal(flops: float) -> float:
    """What is left of an attention over all pairs of tokens."""
    return flops * (SEQ_LEN + 1) / (2 * SEQ_LEN)


# --- the models whose split is to be good


@pytest.mark.parametrize("name", LARGE)
def test_a_split_by_cost_is_near_the_ideal(name: str) -> None:
    config, ranks, limit, even = LARGE[name]
    costs = estimate_costs(make(**config), seq_len=4096)
    works = [layer.work for layer in costs.layers]
    rest = (works, costs.first.work, costs.last.work)
    found = Balance.of(balance(*rest, ranks), *rest)
    assert found.ratio <= limit
    assert found.even_ratio == pytest.approx(even, abs=0.02)


# --- work, in closed form


def test_work_of_llama() -> None:
    model = make()
    costs = estimate(model)
    product = 2 * matrices(model.model.layers[0]) * TOKENS
    pairs = 2 * ROWS * 4 * SEQ_LEN**2 * 16  # one product of heads over all pairs of tokens
    for layer in costs.layers:
        assert layer.forward == product + causal(2 * pairs)
        # The kernel computes the scores again.
        assert layer.backward_input == product + causal(5 * pairs)
        assert layer.backward_weight == product
    head = 2 * 160 * 64 * TOKENS
    assert (costs.last.forward, costs.last.backward_input, costs.last.backward_weight) == (
        head,
    ) * 3
    assert costs.first.work < 0.001 * head  # an embedding multiplies nothing; rotary tables do


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, **MOE, "mlp_only_layers": [1]}),
    ],
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_count_where_tokens_are_sent(
    model_type: str, options: dict[str, Any], implementation: str
) -> None:
    model = make(model_type, **options, experts_implementation=implementation)
    costs = estimate(model, dtype=torch.float64)  # which real kernels for groups do not know
    for layer, block in zip(costs.layers, model.model.layers, strict=True):
        active = matrices(block)
        if hasattr(block.mlp, "experts"):
            experts = block.mlp.experts
            active += 2 * (experts.gate_up_proj[0].numel() + experts.down_proj[0].numel())
        product = 2 * active * TOKENS
        pairs = 2 * ROWS * 4 * SEQ_LEN**2 * 16
        assert layer.forward == pytest.approx(product + causal(2 * pairs))
        assert layer.backward_input == pytest.approx(product + causal(5 * pairs))
        assert layer.backward_weight == pytest.approx(product)
        assert layer.activation_bytes < 40 * TOKENS * 64 * 8  # no copy of an expert per token
    assert model.config._experts_implementation == implementation


def test_products_in_groups_of_rows() -> None:
    groups = torch.tensor([8, 8, 32], dtype=torch.int32)
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 16, 24, dtype=torch.bfloat16, requires_grad=True)
    with flop_counter() as counter:
        product = F.grouped_mm(rows, weight, offs=groups)
        assert counter.get_total_flops() == 2 * 32 * 16 * 24
        torch.autograd.grad(product, weight, torch.ones_like(product), retain_graph=True)
        assert counter.get_total_flops() == 2 * 2 * 32 * 16 * 24
        torch.autograd.grad(product, [rows, weight], torch.ones_like(product))
        assert counter.get_total_flops() == 4 * 2 * 32 * 16 * 24


def test_what_a_mask_hides_is_computed_all_the_same() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make("qwen3", layer_types=kinds, sliding_window=8, use_sliding_window=True)
    slid, full, again = estimate(model).layers
    pairs = 2 * ROWS * 4 * SEQ_LEN**2 * 16
    assert slid == again
    assert slid.forward - full.forward == 2 * pairs - causal(2 * pairs)
    long = estimate(make("qwen3", layer_types=kinds, sliding_window=50, use_sliding_window=True))
    assert long.layers[0] == full  # no longer than the window


def test_all_parts_together_are_the_whole_model() -> None:
    model = make_real(attn_implementation="eager", tie_word_embeddings=True)
    costs = estimate(model)
    ids = torch.zeros((ROWS, SEQ_LEN), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        forward = counter.get_total_flops()
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    parts = [costs.first, *costs.layers, costs.last]
    assert sum(part.forward for part in parts) == forward
    assert sum(part.work for part in parts) == counter.get_total_flops()


def test_twice_as_long_costs_more_than_twice() -> None:
    model = make()
    short, long = (estimate(model, seq_len=length).layers[0] for length in (32, 64))
    assert 2 * short.work < long.work < 4 * short.work
    assert long.activation_bytes == 2 * short.activation_bytes


def test_frozen_parameters_have_no_weight_half() -> None:
    model = make()
    trained = estimate(model)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    frozen = estimate(model)
    layer = frozen.layers[0]
    assert layer.backward_weight == 0
    # A stage sends a gradient back even if nothing is trained before it.
    assert layer.backward_input == trained.layers[0].backward_input
    assert frozen.layers[1:] == trained.layers[1:]
    assert (frozen.first.backward_weight, frozen.last.backward_weight) == (0, 0)
    assert layer.parameter_bytes == trained.layers[0].parameter_bytes / 4
    assert layer.activation_bytes < trained.layers[0].activation_bytes


def test_gradient_checkpointing_runs_the_forward_again() -> None:
    model = make()
    plain = estimate(model).layers[0]
    model.model.layers[0].gradient_checkpointing = True
    again, other, _ = estimate(model).layers
    assert other == plain
    assert again.backward_input == plain.backward_input + plain.forward
    assert again.activation_bytes == TOKENS * 64 * 4
    assert (again.forward, again.backward_weight) == (plain.forward, plain.backward_weight)


# --- bytes


def test_activations_are_what_a_real_layer_saves() -> None:
    model = make_real("qwen3")
    costs = estimate(model)
    layer = model.model.layers[0]
    hidden = torch.randn(ROWS, SEQ_LEN, 64, requires_grad=True)
    tables = tuple(torch.randn(1, SEQ_LEN, 16) for _ in range(2))
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda kept: kept):
        output = layer(hidden, attention_mask=None, position_embeddings=tables)
    for other in (*layer.parameters(), *tables, output, hidden):
        saved.pop(other.untyped_storage().data_ptr(), None)
    assert costs.layers[0].activation_bytes == sum(saved.values()) + hidden.nbytes
    # The last part's input and output, the log of the softmax, and a few things of the norm.
    logits = 4 * TOKENS * 160
    assert 2 * logits < costs.last.activation_bytes - hidden.nbytes < 2 * logits + 3 * hidden.nbytes
    # Ids, and the tables that every stage makes anew.
    assert costs.first.activation_bytes == 8 * TOKENS + 2 * 4 * SEQ_LEN * 16


def test_bytes_of_parameters() -> None:
    model = make()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    plain = estimate(model)
    assert plain.layers[0].parameter_bytes == 16 * layer
    assert plain.first.parameter_bytes == 16 * 160 * 64
    assert plain.last.parameter_bytes == 16 * (160 * 64 + 64)
    half = estimate(model, dtype=torch.bfloat16)
    assert half.layers[0].parameter_bytes == 8 * layer
    assert half.layers[0].forward == plain.layers[0].forward
    assert half.layers[0].activation_bytes < plain.layers[0].activation_bytes
    mixed = estimate(model, dtype=torch.bfloat16, optimizer_bytes_per_parameter=12)
    assert mixed.layers[0].parameter_bytes == 16 * layer
    assert estimate(make(tie_word_embeddings=True)).last.parameter_bytes == 16 * (160 * 64 + 64)


def test_bytes_of_a_boundary() -> None:
    assert estimate(make()).boundary_bytes == 4 * TOKENS * 64
    assert estimate(make(), dtype=torch.bfloat16).boundary_bytes == 2 * TOKENS * 64


# --- what it does to the model, and what it needs of it


def test_a_real_model_costs_what_a_meta_model_does_and_stays_as_it_is() -> None:
    model = make_real()
    before = {name: (p, p._version) for name, p in model.named_parameters()}
    state = [dict(vars(module)) for module in model.modules()]
    assert estimate(model) == estimate(make())
    assert all(
        p is before[n][0] and p._version == before[n][1] for n, p in model.named_parameters()
    )
    assert [dict(vars(module)) for module in model.modules()] == state
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_json(tmp_path: Path) -> None:
    costs = estimate(make())
    costs.to_json(tmp_path / "costs.json")
    assert Costs.from_json(tmp_path / "costs.json") == costs
    seconds = costs.in_seconds(1e12)
    assert seconds.layers[0].forward == costs.layers[0].forward / 1e12


def test_heads_of_other_tasks() -> None:
    config = AutoConfig.for_model("llama", **SMALL, num_labels=3)
    with init_empty_weights():
        model = AutoModelForSequenceClassification.from_config(config)
    costs = estimate(model)
    assert costs.layers == estimate(make()).layers
    assert costs.last.forward == 2 * 3 * 64 * TOKENS
    base = estimate(model.model)
    assert base.layers == costs.layers
    assert base.last.work == 0
    assert base.last.parameter_bytes == 16 * 64


class RoutedByHand(nn.Module):
    """Sends each token to one of two experts, in a loop over what was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2)
        self.experts = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
        return y


def test_work_that_depends_on_values_is_refused() -> None:
    model = make()
    model.model.layers[1].mlp = RoutedByHand()
    with pytest.raises(ValueError, match=r"model.layers.1 values decide.*measure_costs"):
        estimate(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 0, "microbatch_size": 1.5}, ["seq_len=0", "microbatch_size=1.5"]),
        ({"seq_len": True}, ["seq_len=True"]),
        ({"optimizer_bytes_per_parameter": -1}, ["optimizer_bytes_per_parameter=-1"]),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM") as caught:
        estimate(make(), **options)
    assert all(word in str(caught.value) for word in words)


def test_more_tokens_than_learned_positions() -> None:
    model = make("gpt2", n_positions=64, intermediate_size=None)
    assert estimate(model, seq_len=64).first.work == 0
    with pytest.raises(ValueError, match="seq_len=65: the model has 64 positions"):
        estimate(model, seq_len=65)


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match="no list of decoder layers"):
        estimate(nn.Linear(2, 2))


def test_layers_that_never_run() -> None:
    model = make()
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"never runs model.layers.2"):
        estimate(model)


def test_a_layout_that_is_known_is_not_sought() -> None:
    model = make()
    layout = find_layout(model)
    assert estimate(model, layout=layout) == estimate(model)
