from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from pp_split_hf import (
    Tie,
    TiedParameters,
    check_pipeline_support,
    find_layout,
    find_ties,
    init_empty_weights,
    initialize_stage_weights,
    move_stages,
    plan_stage_fqns,
    split_model_into_stages,
)

Tiny = Callable[..., PreTrainedModel]
EMBEDDINGS = {"gpt2": "transformer.wte.weight"}


def ties(model: PreTrainedModel, counts: tuple[int, ...]) -> tuple[Tie, ...]:
    layout = find_layout(model)
    assert check_pipeline_support(model) == []
    return find_ties(model, layout, plan_stage_fqns(layout, counts))


@pytest.mark.parametrize("context", [None, init_empty_weights, lambda: torch.device("meta")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_tie_that_the_config_declares(
    family: str, context: Callable[[], object] | None, tiny: Tiny
) -> None:
    if context is None:
        model = tiny(family, 2, tie_word_embeddings=True)
    else:
        with context():  # type: ignore[attr-defined]
            model = tiny(family, 2, tie_word_embeddings=True)
    embedding = EMBEDDINGS.get(family, "model.embed_tokens.weight")
    [tie] = ties(model, (1, 0, 1))
    assert tie.names == ((0, embedding), (2, "lm_head.weight"))
    assert tie.stages == (0, 2)
    assert ties(model, (2,)) == ()


def test_a_tie_by_hand(tiny: Tiny) -> None:
    model = tiny("llama", 2)
    assert ties(model, (1, 1)) == ()
    model.lm_head.weight = model.model.embed_tokens.weight
    [tie] = ties(model, (1, 1))
    assert tie.stages == (0, 1)


def test_a_tie_that_was_undone_by_hand_is_no_tie(tiny: Tiny) -> None:
    model = tiny("llama", 2, tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert ties(model, (1, 1)) == ()


def test_layers_that_share_a_weight(tiny: Tiny) -> None:
    model = tiny("llama", 3)
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert ties(model, (0, 3)) == ()
    [tie] = ties(model, (1, 1, 1))
    assert tie.names == (
        (0, "model.layers.0.mlp.up_proj.weight"),
        (2, "model.layers.2.mlp.up_proj.weight"),
    )


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize("empty", [False, True])
def test_two_stages_of_one_rank_share_the_parameter(
    empty: bool, group: dist.ProcessGroup, tiny: Tiny
) -> None:
    if empty:
        with init_empty_weights():
            model = tiny("llama", 2, tie_word_embeddings=True)
    else:
        model = tiny("llama", 2, tie_word_embeddings=True)
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, (1, 1))
    first, last = split_model_into_stages(model, plan, [0, 1], layout)
    move_stages([first, last], "cpu", torch.float64)
    tied = TiedParameters(find_ties(model, layout, plan), {0: first, 1: last}, [0, 0], group)
    for part in (first, last):
        initialize_stage_weights(part, "cpu", seed=1)
    tied.reshare()
    tied.broadcast()
    weight = first.get_parameter("model.embed_tokens.weight")
    assert last.get_parameter("lm_head.weight") is weight
    assert weight.dtype == torch.float64
    assert not hasattr(weight, "pp_replica")
    assert not tied.across_ranks
    with tied.summed():
        weight.grad = torch.ones_like(weight)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    tied.check(torch.optim.SGD([weight]))  # one rank has nothing to forget


def test_one_seed_gives_a_tied_weight_the_values_of_the_embedding(tiny: Tiny) -> None:
    models = []
    for tie in (False, True):
        with init_empty_weights():
            models.append(tiny("llama", 2, tie_word_embeddings=tie))
        initialize_stage_weights(models[-1], "cpu", seed=3)
    apart, tied = models
    assert torch.equal(tied.lm_head.weight, apart.model.embed_tokens.weight)
