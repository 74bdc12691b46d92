"""What the planner gains over 1F1B and over the best schedule that has a name, and how long it takes.

    python benchmarks/planner.py

For each model and number of ranks: costs counted from shapes at 4096 tokens per row, at 45 % of an
H100's peak, and the memory of 1F1B with an even split as the limit. Nothing is run but the planner.
The last line plans 64 ranks and 256 microbatches.
"""

import argparse
import time
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from pp_autopipeline import Costs, estimate_costs, init_empty_weights
from pp_schedule import Plan, named_order, plan, simulate
from pp_schedule.balancing import even_counts

SEQ_LEN = 4096
MODELS: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
    "Llama-3.1-70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=False,
    ),
}


def main() -> None:
    """Print a row per model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--microbatches-per-rank", type=int, default=4)
    parser.add_argument("--effort", type=float, default=1.0)
    arguments = parser.parse_args()
    print(
        "1F1B: even split. Named: the best schedule with a name, any split. Plan: what is chosen; "
        "own: the fastest order\nfound. Times are x the ideal; bound is the lowest of any split "
        "tried.\n"
    )
    print(
        f"{'model':<14}{'ranks':>6}{'m':>5}{'1F1B':>8}{'named':>8}{'plan':>8}{'own':>8}{'bound':>8}"
        f"{'speed-up':>10}{'CPU s':>7}  chosen"
    )
    for name, config in MODELS.items():
        costs = costs_of(config)
        for pp_size in arguments.ranks:
            if pp_size <= len(costs.layers):
                m = arguments.microbatches_per_rank * pp_size
                print(f"{name:<14}" + row(costs, pp_size, m, arguments.effort), flush=True)
    deep = costs_of(MODELS["Llama-3.1-70B"])
    deep = replace(deep, layers=[*deep.layers, *deep.layers[:50]])
    print(f"{'130 layers':<14}" + row(deep, 64, 256, arguments.effort))


def costs_of(config: PreTrainedConfig) -> Costs:
    """Costs of a row in seconds."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    costs = estimate_costs(model, seq_len=SEQ_LEN).in_seconds(0.45 * 989e12)
    return replace(costs, latency=20e-6, bandwidth=450e9, overhead=100e-6)


def row(costs: Costs, pp_size: int, num_microbatches: int, effort: float) -> str:
    """Plan, and return the figures as text."""
    even = costs.for_stages(even_counts(len(costs.layers), pp_size))
    baseline = simulate(named_order("1f1b", pp_size, pp_size, num_microbatches), even)
    limit = max(baseline.peak_memory)
    begin = time.process_time()
    found = plan(costs, pp_size, num_microbatches, memory_limit=limit, effort=effort)
    seconds = time.process_time() - begin
    return figures(found, pp_size, num_microbatches, seconds)


def figures(found: Plan, pp_size: int, num_microbatches: int, seconds: float) -> str:
    """Return a plan's row."""
    fitting = [c for c in found.candidates if c.fits]
    ideal = found.best.ideal_time
    named = min((c.step_time for c in fitting if c.is_named), default=float("nan"))
    own = min(c.step_time for c in fitting)
    bound = min(c.lower_bound for c in found.candidates)
    times = [found.baseline.step_time, named, found.best.step_time, own, bound]
    cells = "".join(f"{time / ideal:>8.3f}" for time in times)
    style = " V" if found.best.style == "v" else ""
    return (
        f"{pp_size:>6}{num_microbatches:>5}{cells}"
        f"{found.baseline.step_time / found.best.step_time:>10.2f}{seconds:>7.1f}  "
        f"{found.best.schedule}, {found.best.stages_per_rank}{style} per rank"
    )


if __name__ == "__main__":
    main()
