"""Stages under `torch.compile` and under Transformers' own activation checkpointing.

A compiled stage is one graph, and gives what it gives without being compiled.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from batches import make_batch
from tiny_models import FAMILIES, tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from pp_patch_hf import patch_hf_model_for_pp
from pp_split_hf import find_layout, plan_stage_fqns, split_model_into_stages

# More than hidden states crosses their boundaries, and Dynamo takes the unsplit models whole.
CARRIED = ("zamba2", "gemma3n_text", "cpmant", "inkling2_text")


def make_model(name: str, num_layers: int = 4) -> nn.Module:
    overrides: dict[str, Any] = {}
    if name == "mixtral":  # a loop over the experts that were hit is no one graph, unsplit either
        overrides["experts_implementation"] = "grouped_mm"
    model: nn.Module = tiny_model(name, num_layers, torch.float32, **overrides)
    return model.train()


def first_middle_last(model: nn.Module) -> tuple[int, ...]:
    """Layers of three stages, cut where the model first and last can be."""
    trace = find_layout(model).trace
    num_layers = len(trace.crossings) - 1
    inner = [cut for cut in trace.cuts if 0 < cut < num_layers]
    return (inner[0], inner[-1] - inner[0], num_layers - inner[-1])


def stages(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    """Patched stages, with the very parameters of the model."""
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    parts = split_model_into_stages(model, plan, range(len(plan)), layout)
    for part in parts:
        patch_hf_model_for_pp(part)
    return parts


def as_tuple(sent: Any) -> tuple[torch.Tensor, ...]:
    return sent if isinstance(sent, tuple) else (sent,)


def received(sent: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the next stage receives of what was sent: leaves that take a gradient where it must."""
    pairs = zip(sent, like, strict=True)
    return [each.detach().clone().requires_grad_(other.requires_grad) for each, other in pairs]


def gradients(
    module: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Backward from a fixed projection; return the gradients, and leave the parameters' empty."""
    trained = [each for each in outputs if each.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator) for each in trained]
    torch.autograd.backward(trained, weights)
    found = {name: p.grad for name, p in module.named_parameters()}
    found |= {f"input {number}": each.grad for number, each in enumerate(inputs)}
    module.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def compare(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # A gradient that is zero but for rounding, as of a key's bias, has no relative error.
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (got[name] - gradient).abs().max() <= 1e-5 * scale, name


def check_compiled(name: str, counts: Sequence[int] | None = None) -> None:
    """Run each stage twice, on two batches, without and with compilation."""
    model = make_model(name, sum(counts) if counts else 4)
    parts = stages(model, counts or first_middle_last(model))
    batches = [make_batch("plain", 2, seed)["input_ids"] for seed in (5, 6)]
    crossing = [[ids] for ids in batches]
    for part in parts:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(part, fullgraph=True, backend=counter)
        for number, ids in enumerate(batches):
            runs = []
            for forward in (part, compiled):
                inputs = received(crossing[number], crossing[number])
                outputs = as_tuple(forward(*inputs, input_ids=ids))
                runs.append((outputs, gradients(part, inputs, outputs)))
            (wanted, wanted_gradients), (got, got_gradients) = runs
            for mine, theirs in zip(got, wanted, strict=True):
                assert mine.requires_grad == theirs.requires_grad
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            compare(got_gradients, wanted_gradients)
            assert got_gradients or not list(part.parameters())
            for mine in got:
                mine.detach_()  # as torch's stages do, which no view allows
            crossing[number] = received(wanted, wanted)
        assert counter.frame_count == 1, "the second batch was compiled again"


@pytest.mark.parametrize("name", [*FAMILIES, *CARRIED])
def test_a_stage_is_one_graph(name: str) -> None:
    check_compiled(name)


@pytest.mark.parametrize(
    ("name", "counts"), [("llama", (1, 0, 2)), ("gpt2", (0, 2, 0)), ("cpmant", (0, 0, 4))]
)
def test_a_stage_without_layers_is_one_graph(name: str, counts: tuple[int, ...]) -> None:
    check_compiled(name, counts)


# --- activation checkpointing


def all_gradients(
    parts: Sequence[nn.Module], batches: Sequence[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Sums over batches whose forwards all run before the first backward."""
    losses = []
    for batch in batches:
        crossing: tuple[torch.Tensor, ...] = (batch["input_ids"],)
        for part in parts:
            crossing = as_tuple(part(*crossing, **batch))
        losses.append(crossing[0].square().mean())
    for loss in losses:
        loss.backward()
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
    for part in parts:
        part.zero_grad()
    return found


# The unsplit model does too: keys and values that its layers share go around the checkpoints.
LOSES_GRADIENTS = ("gemma3n_text", True)


def count_layer_runs(model: nn.Module, parts: Sequence[nn.Module]) -> dict[str, int]:
    """Count from now on how often each layer runs, by a hook inside of what is checkpointed."""
    counts: dict[str, int] = {}

    def count(fqn: str) -> None:
        counts[fqn] = counts.get(fqn, 0) + 1

    for fqn in find_layout(model).layer_fqns:
        for part in parts:
            layer = part.get_submodule(fqn)
            if isinstance(layer, type(model.get_submodule(fqn))):  # else a stand-in
                child = next(layer.children())
                child.register_forward_pre_hook(lambda *_, fqn=fqn: count(fqn))
    return counts


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3n_text", "zamba2"])
def test_transformers_own_checkpointing(name: str, reentrant: bool) -> None:
    model = make_model(name)
    assert isinstance(model, PreTrainedModel)
    counts = first_middle_last(model)
    batches = [{"input_ids": make_batch("plain", 2, seed)["input_ids"]} for seed in (5, 6)]
    plain = all_gradients(stages(model, (sum(counts),)), batches)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wanted = all_gradients(stages(model, (sum(counts),)), batches)
    if (name, reentrant) != LOSES_GRADIENTS:
        compare(wanted, plain)
    parts = stages(model, counts)
    ran = count_layer_runs(model, parts)
    compare(all_gradients(parts, batches), wanted)
    assert ran == dict.fromkeys(find_layout(model).layer_fqns, 2 * len(batches))
