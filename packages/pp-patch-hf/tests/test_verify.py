import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pp_patch_hf import CutReport, VerifyReport, verify_pipeline

Tiny = Callable[..., PreTrainedModel]
FAMILIES = ["llama", "mistral", "gemma2", "gpt2", "granite", "mixtral"]
RTOL = 1e-11


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(2))
    if kind == "packed":
        starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3, 4, 5, 6, 0]])
        return {"input_ids": ids, "position_ids": starts}
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[0, :3] = mask[1, :1] = 0
    else:
        mask[0, -4:] = mask[1, -2:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_is_exact(family: str, tiny: Tiny) -> None:
    report = verify_pipeline(tiny(family, 4), rtol=RTOL)
    assert [cut.layer_counts for cut in report.cuts] == [(i, 4 - i) for i in range(5)]
    assert report.exact, report


@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_some_of_them_empty(family: str, tiny: Tiny) -> None:
    splits = [(1, 1, 1), (1, 0, 2), (0, 3, 0), (3, 0, 0), (0, 0, 3)]
    report = verify_pipeline(tiny(family, 3), splits, rtol=RTOL)
    assert [cut.layer_counts for cut in report.cuts] == splits
    assert report.exact, report


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_masks_and_positions_reach_every_stage(family: str, kind: str, tiny: Tiny) -> None:
    model, rtol = tiny(family, 3), RTOL
    if family == "gemma2":  # its own attention gives NaN for padded float64
        model, rtol = model.float(), 1e-5
    report = verify_pipeline(model, [(1, 1, 1), (0, 2, 1)], batch(kind), rtol)
    assert report.exact, report


@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_masks_and_positions_matter_to_what_is_compared(kind: str, tiny: Tiny) -> None:
    model, inputs = tiny("llama", 2), batch(kind)
    assert not torch.allclose(model(**inputs).logits, model(inputs["input_ids"]).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_bare_decoder(family: str, tiny: Tiny) -> None:
    report = verify_pipeline(tiny(family, 3, bare=True), [(1, 2), (0, 3), (1, 0, 2)], rtol=RTOL)
    assert report.exact, report


def test_the_model_stays_as_it_was(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    verify_pipeline(model)
    assert "forward" not in vars(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_frozen_parameters(tiny: Tiny) -> None:
    model = tiny("llama", 3)
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    report = verify_pipeline(model, [(1, 2), (2, 1)], rtol=RTOL)
    assert report.exact, report


def test_a_tied_model(tiny: Tiny) -> None:
    report = verify_pipeline(tiny("llama", 2, tie_word_embeddings=True))
    assert report.exact, report


# --- architectures of one's own


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, num_hidden_layers: int = 3, **kwargs: Any) -> None:
        self.num_hidden_layers = num_hidden_layers
        self.vocab_size = 20
        super().__init__(**kwargs)


class Own(PreTrainedModel):
    """The least a model needs: its forward takes ids alone and returns a tensor."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(20, 6)
        self.steps = nn.ModuleList([nn.Linear(6, 6) for _ in range(config.num_hidden_layers)])
        self.out = nn.Linear(6, 20)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = self.words(input_ids)
        for step in self.steps:
            states = step(states).tanh()
        return self.out(states)


class Remembering(Own):
    """Every layer adds what the first one left behind, which does not cross a boundary."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
        states = self.words(input_ids)
        first = None
        for step in self.steps:
            states = step(states).tanh()
            first = states if first is None else first
            states = states + 0.5 * first
        return (self.out(states),)


class Residual(Own):
    """The head sees the embeddings, which only the first stage has."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
        states = words = self.words(input_ids)
        for step in self.steps:
            states = step(states).tanh()
        return (self.out(states + words),)


class Bypassing(Own):
    """What is added to a layer's output did not go through the layer."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
        states = self.words(input_ids)
        for step in self.steps:
            states = states + step(states).tanh()
        return (self.out(states),)


def test_the_least_a_model_needs() -> None:
    torch.manual_seed(4)
    report = verify_pipeline(Own(OwnConfig()).double(), [(1, 2), (0, 3), (1, 1, 1)], rtol=RTOL)
    assert report.exact, report


@pytest.mark.parametrize("broken", [Remembering, Residual])
def test_what_cannot_cross_is_refused(broken: type[Own]) -> None:
    with pytest.raises(ValueError, match="computed from work on both sides of the boundary"):
        verify_pipeline(broken(OwnConfig()).double(), [(2, 1)], rtol=RTOL)


def test_code_that_goes_on_with_the_hidden_states_beside_the_layer() -> None:
    torch.manual_seed(4)
    report = verify_pipeline(Bypassing(OwnConfig()).double(), rtol=RTOL)
    assert report.exact, report


class Absent(Own):
    """Each layer adds to a list of the model, which no call shows."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
        states = self.words(input_ids)
        self.seen = []
        for step in self.steps:
            states = step(states).tanh()
            self.seen.append(states.detach())
        return (self.out(states + sum(self.seen)),)


def test_what_no_graph_shows_is_noticed() -> None:
    torch.manual_seed(4)
    report = verify_pipeline(Absent(OwnConfig()).double(), [(2, 1)], rtol=RTOL)
    assert not report.exact
    [cut] = report.cuts
    assert cut.logits_error > 1e-3
    assert "NOT EXACT" in str(report)


# --- the report


def test_report() -> None:
    good = CutReport((1, 3), 1e-7, 2e-6, "lm_head.weight")
    bad = CutReport((4, 0), 1e-7, 2e-4, "model.norm.weight")
    assert good.exact(1e-5)
    assert not bad.exact(1e-5)
    assert bad.exact(1e-3)
    assert not good.exact(1e-8)
    report = VerifyReport((good, bad), 1e-5)
    assert not report.exact
    assert VerifyReport((good,), 1e-5).exact
    head, first, second = str(report).splitlines()
    assert head.split() == ["layers", "per", "stage", "logits", "gradients", "worst", "parameter"]
    assert re.fullmatch(r"1,3 +1\.0e-07 +2\.0e-06  lm_head\.weight", first)
    assert re.fullmatch(r"4,0 +1\.0e-07 +2\.0e-04  model\.norm\.weight  NOT EXACT", second)
