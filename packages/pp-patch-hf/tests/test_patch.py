from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from pp_patch_hf import patch_hf_model_for_pp
from pp_split_hf import find_layout, plan_stage_fqns, split_model_into_stages

Tiny = Callable[..., PreTrainedModel]
IDS = torch.arange(3, 19).reshape(2, 8)


def split(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    return split_model_into_stages(model, plan, range(len(plan)), layout)


def patched(model: nn.Module, counts: Sequence[int]) -> list[nn.Module]:
    parts = split(model, counts)
    for part in parts:
        patch_hf_model_for_pp(part)
    return parts


def close(got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


# --- what goes in and out


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_tensors_in_and_tensors_out(family: str, tiny: Tiny) -> None:
    model = tiny(family, 3)
    first, second, last = patched(model, (1, 1, 1))
    hidden = first(IDS)
    assert hidden.shape == (2, 8, 32)
    hidden = second(hidden, input_ids=IDS)
    assert hidden.shape == (2, 8, 32)
    close(last(hidden, input_ids=IDS), model(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "granite", "mixtral", "gpt2"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 0), (0, 0, 3)])
def test_later_stages_without_ids(family: str, counts: tuple[int, ...], tiny: Tiny) -> None:
    model = tiny(family, 3)
    hidden: torch.Tensor = IDS
    for part in patched(model, counts):
        hidden = part(hidden)
    close(hidden, model(IDS).logits)


def test_a_bare_decoder_gives_its_last_hidden_states(tiny: Tiny) -> None:
    model = tiny("llama", 3, bare=True)
    first, last = patched(model, (1, 2))
    close(last(first(IDS), input_ids=IDS), model(IDS).last_hidden_state)


def test_a_whole_model_is_its_own_first_and_last_stage(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    logits = model(IDS).logits
    patch_hf_model_for_pp(model)
    close(model(IDS), logits)


@pytest.mark.parametrize("keep", [1, 3])
def test_logits_to_keep(keep: int, tiny: Tiny) -> None:
    model = tiny("llama", 2)
    first, last = patched(model, (1, 1))
    hidden = first(IDS, logits_to_keep=keep)
    assert hidden.shape == (2, 8, 32)
    logits = last(hidden, input_ids=IDS, logits_to_keep=keep)
    assert logits.shape == (2, keep, 64)
    close(logits, model(IDS).logits[:, -keep:])


def test_what_a_layer_left_out_says() -> None:
    model = Skipping(OwnConfig(3)).double()
    first, _ = patched(model, (1, 2))
    first.skip = True
    with pytest.raises(RuntimeError, match=r"stage 0 never reached \S*\.1, where"):
        first(IDS % 20)


# --- on and off


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("counts", [(1, 2), (0, 3), (3, 0)])
def test_a_patch_comes_off(family: str, counts: tuple[int, ...], tiny: Tiny) -> None:
    parts = split(tiny(family, 3), counts)
    kinds = [[type(module) for module in part.modules()] for part in parts]
    before = [part(IDS).logits for part in parts]
    for part in parts:
        patch = patch_hf_model_for_pp(part)
        assert torch.is_tensor(part(IDS if part is parts[0] else torch.zeros(2, 8, 32).double()))
        patch.remove()
        patch.remove()  # nothing is left to take off
    assert [[type(module) for module in part.modules()] for part in parts] == kinds
    for part, logits in zip(parts, before, strict=True):
        assert torch.equal(part(IDS).logits, logits)
        assert "forward" not in vars(part)


def test_a_patch_goes_on_again(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    first, last = split(model, (1, 1))
    for _ in range(2):
        patches = [patch_hf_model_for_pp(part) for part in (first, last)]
        close(last(first(IDS)), model(IDS).logits)
        for patch in patches:
            patch.remove()


def test_names_stay_those_of_the_whole_model(tiny: Tiny) -> None:
    model = tiny("llama", 3)
    names = [name for part in patched(model, (1, 0, 2)) for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_gated_layer_is_still_what_it_was(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    _, last = patched(model, (1, 1))
    assert isinstance(last.model.layers[1], type(model.model.layers[1]))
    assert type(last.model.layers[1]).__name__ == type(model.model.layers[1]).__name__


BOTH = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_twice_is_refused(first: tuple[bool, bool], second: tuple[bool, bool], tiny: Tiny) -> None:
    part = split(tiny("llama", 2), (1, 1))[1]
    patch = patch_hf_model_for_pp(part, *first)
    with pytest.raises(ValueError, match="patched already"):
        patch_hf_model_for_pp(part, *second)
    patch.remove()
    patch_hf_model_for_pp(part, *second).remove()


# --- which module is patched


def test_the_decoder_alone(tiny: Tiny) -> None:
    model = tiny("llama", 3)
    first, last = split(model, (1, 2))
    for part in (first, last):
        patch_hf_model_for_pp(part, patch_inner_model=True, patch_causal_lm_model=False)
        assert "forward" not in vars(part)
    states = last.model(first.model(IDS), input_ids=IDS)
    close(states, model.model(IDS).last_hidden_state)
    close(last.lm_head(states), model(IDS).logits)


def test_the_decoder_alone_of_a_bare_decoder(tiny: Tiny) -> None:
    model = tiny("llama", 3, bare=True)
    first, last = split(model, (1, 2))
    for part in (first, last):
        patch_hf_model_for_pp(part, patch_causal_lm_model=False)
    close(last(first(IDS)), model(IDS).last_hidden_state)


@pytest.mark.parametrize("flags", [(False, False), (False, True)])
def test_a_bare_decoder_that_is_left_alone(flags: tuple[bool, bool], tiny: Tiny) -> None:
    part = split(tiny("llama", 2, bare=True), (1, 1))[0]
    patch = patch_hf_model_for_pp(part, *flags)
    assert not torch.is_tensor(part(IDS))
    patch.remove()


def test_neither(tiny: Tiny) -> None:
    part = split(tiny("llama", 2), (1, 1))[0]
    patch_hf_model_for_pp(part, False, False).remove()
    assert "forward" not in vars(part)
    assert not torch.is_tensor(part(IDS))


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, num_hidden_layers: int = 3, **kwargs: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        self.vocab_size = 20
        super().__init__(**kwargs)


class Decoder(nn.Module):
    """A decoder made for stages: ids in or states in, a tensor out."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.steps = nn.ModuleList([nn.Linear(6, 6) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = x if x.is_floating_point() else self.words(x)
        for step in self.steps:
            states = step(states)
        return self.norm(states)


class StageFriendly(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.num_hidden_layers)
        self.head = nn.Linear(6, 20)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.decoder(input_ids)))


class Skipping(StageFriendly):
    skip = False

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        states = self.decoder.words(input_ids)
        if not self.skip:
            for step in self.decoder.steps:
                states = step(states)
        return CausalLMOutput(logits=self.head(self.decoder.norm(states)))


def test_a_decoder_that_is_made_for_stages() -> None:
    torch.manual_seed(2)
    model = StageFriendly(OwnConfig(3)).double()
    parts = split(model, (1, 1, 1))
    states: torch.Tensor = IDS % 20
    for part in parts:
        patch_hf_model_for_pp(part, patch_inner_model=False)
        states = part(states)
        assert torch.is_tensor(states)
    close(states, model(IDS % 20).logits)


def test_a_forward_that_returns_no_tensor() -> None:
    class Talkative(StageFriendly):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
            return {"answer": super().forward(input_ids).logits}

    part = Talkative(OwnConfig(2))
    patch_hf_model_for_pp(part)
    with pytest.raises(TypeError, match="returned a dict without logits"):
        part(IDS % 20)


def test_a_forward_that_knows_no_use_cache() -> None:
    class Terse(StageFriendly):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids)

    model = Terse(OwnConfig(2)).double()
    first, last = patched(model, (1, 1))
    close(last(first(IDS % 20)), model(IDS % 20).logits)


# --- activation checkpointing: what is run again in the backward belongs to its own microbatch


MICROBATCHES = [torch.arange(3, 19).reshape(2, 8), torch.arange(40, 56).reshape(2, 8)]


def whole_gradients(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    model.zero_grad()
    for ids in MICROBATCHES:
        model(ids, use_cache=False).logits.pow(2).sum().backward()
    gradients = {id(p): p.grad for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def run_both_in_flight(parts: list[nn.Module]) -> None:
    """Both forwards pass a stage before any backward comes back through it."""
    inputs: list[list[torch.Tensor]] = [MICROBATCHES]
    outputs = []
    for part in parts:
        outputs.append(
            [part(x, input_ids=ids) for x, ids in zip(inputs[-1], MICROBATCHES, strict=True)]
        )
        inputs.append([y.detach().requires_grad_() for y in outputs[-1]])
    for microbatch in range(2):
        gradient = 2 * outputs[-1][microbatch].detach()
        for stage in reversed(range(len(parts))):
            outputs[stage][microbatch].backward(gradient)
            if stage:
                received = inputs[stage][microbatch].grad
                assert received is not None
                gradient = received


def compare(parts: list[nn.Module], wanted: dict[int, torch.Tensor]) -> None:
    got = {id(p): p.grad for part in parts for p in part.parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for key, gradient in wanted.items():
        close(got[key], gradient)


COUNTS = [(1, 2, 1), (0, 2, 2), (2, 0, 2), (2, 2, 0), (4,)]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("llama", True), ("llama", False), ("gemma2", False), ("gpt2", False)],
)
def test_gradient_checkpointing(
    family: str, reentrant: bool, counts: tuple[int, ...], tiny: Tiny
) -> None:
    model = tiny(family, 4).train()
    wanted = whole_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers = find_layout(model).layers
    parts = patched(model, counts)
    calls: list[int] = []
    for part in parts:
        for child in list(part.get_submodule(layers)[1].children())[:1]:  # a stand-in has none
            child.register_forward_pre_hook(lambda *_: calls.append(1))
    run_both_in_flight(parts)
    compare(parts, wanted)
    assert len(calls) == 4  # it ran again for both microbatches


def wrap_layers(part: nn.Module) -> None:
    layers = part.get_submodule("model.layers")
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)


@pytest.mark.parametrize("counts", COUNTS)
def test_torchs_wrapper_before_the_patch(counts: tuple[int, ...], tiny: Tiny) -> None:
    model = tiny("llama", 4).train()
    wanted = whole_gradients(model)
    parts = split(model, counts)
    for part in parts:
        wrap_layers(part)
        patch_hf_model_for_pp(part)
    run_both_in_flight(parts)
    compare(parts, wanted)


@pytest.mark.parametrize("counts", [(1, 2, 1), (0, 2, 2)])
def test_torchs_wrapper_after_the_patch_is_an_error(counts: tuple[int, ...], tiny: Tiny) -> None:
    model = tiny("llama", 4).train()
    parts = patched(model, counts)
    for part in parts:
        wrap_layers(part)
    with pytest.raises(RuntimeError, match=r"stage 2 .*Wrap the layers first"):
        run_both_in_flight(parts)


def test_a_class_that_was_changed_since_cannot_be_given_back(tiny: Tiny) -> None:
    part = split(tiny("llama", 2), (1, 1))[1]
    patch = patch_hf_model_for_pp(part)
    layer = part.model.layers[1]
    layer.__class__ = type("Wrapped", (type(layer),), {})
    with pytest.raises(RuntimeError, match="wrapped after it was patched"):
        patch.remove()


# --- an error in a forward leaves nothing behind


def test_after_an_error_the_stage_runs_again(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    first, last = patched(model, (1, 1))
    with pytest.raises(RuntimeError):
        last(torch.zeros(2, 8, 31).double(), input_ids=IDS)
    close(last(first(IDS), input_ids=IDS), model(IDS).logits)
