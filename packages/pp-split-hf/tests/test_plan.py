from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from pp_split_hf import (
    check_stage_fqns,
    find_layout,
    generate_hf_model_fqn_per_model_part,
    plan_stage_fqns,
    spread_layers,
)

Tiny = Callable[..., PreTrainedModel]


def layers(names: list[str]) -> list[int]:
    return [int(name.rpartition(".")[2]) for name in names if ".layers." in f".{name}"]


def test_every_layer_once_in_order_and_as_even_as_can_be() -> None:
    for num_layers in range(1, 65):
        for num_stages in range(1, 17):
            plan = generate_hf_model_fqn_per_model_part(num_stages, num_layers)
            assert [i for names in plan for i in layers(names)] == list(range(num_layers))
            sizes = [len(layers(names)) for names in plan]
            assert tuple(sizes) == spread_layers(num_layers, num_stages)
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)  # the first stages take the remainder


def test_thirty_layers_on_four_stages() -> None:
    plan = generate_hf_model_fqn_per_model_part(4, 30)
    assert [len(layers(names)) for names in plan] == [8, 8, 7, 7]
    assert layers(plan[2]) == list(range(16, 23))


def test_order_of_names() -> None:
    plan = generate_hf_model_fqn_per_model_part(
        num_stages=2, num_layers=2, extra_module_fqns=["model.a", "b"]
    )
    first, last = plan
    encoders = [name for name in first if "vision" in name or "audio" in name]
    assert len(encoders) >= 2
    assert first[0] == "model.embed_tokens"
    assert first[-4:] == ["model.a", "b", "model.layers.0", "model.rotary_emb"]
    assert all(first.index(name) < first.index("model.a") for name in encoders)
    assert last == ["model.layers.1", "model.norm", "lm_head", "model.rotary_emb"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            {"fqn_prefix": "", "include_rotary_emb": False},
            [["embed_tokens", "layers.0", "layers.1"], ["layers.2", "norm", "lm_head"]],
        ),
        (
            {"include_embeddings": False, "include_lm_head": False},
            [
                ["model.layers.0", "model.layers.1", "model.rotary_emb"],
                ["model.layers.2", "model.norm", "model.rotary_emb"],
            ],
        ),
        (
            {"fqn_prefix": "model.text.", "lm_head_fqn": "head.out"},
            [
                ["model.text.embed_tokens", "model.text.layers.0", "model.text.layers.1",
                 "model.text.rotary_emb"],
                ["model.text.layers.2", "model.text.norm", "head.out", "model.text.rotary_emb"],
            ],
        ),
    ],
)  # fmt: skip
def test_options(options: dict[str, object], wanted: list[list[str]]) -> None:
    plan = generate_hf_model_fqn_per_model_part(2, 3, include_multimodal_encoders=False, **options)
    assert plan == wanted


@pytest.mark.parametrize(
    ("sizes", "words"), [((0, 4), ["num_stages=0"]), ((0, -1), ["num_stages=0", "num_layers=-1"])]
)
def test_sizes_that_make_no_plan(sizes: tuple[int, int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot make a stage plan") as caught:
        generate_hf_model_fqn_per_model_part(*sizes)
    assert all(word in str(caught.value) for word in words)


def test_a_generated_plan_fits_the_model_it_is_named_for(tiny: Tiny) -> None:
    model = tiny("llama", 5)
    layout = find_layout(model)
    for num_stages in range(1, 8):
        generated = generate_hf_model_fqn_per_model_part(num_stages, 5)
        assert check_stage_fqns(layout, generated, model) == []
        planned = plan_stage_fqns(layout, spread_layers(5, num_stages))
        assert check_stage_fqns(layout, planned, model) == []
        known = set(dict(model.named_modules()))
        assert [[n for n in names if n in known] for names in generated] == planned


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("counts", [(3,), (1, 2), (0, 3), (3, 0), (1, 0, 2), (0, 3, 0), (0, 0, 3)])
def test_any_numbers_of_layers(family: str, counts: tuple[int, ...], tiny: Tiny) -> None:
    model = tiny(family, 3)
    layout = find_layout(model)
    plan = plan_stage_fqns(layout, counts)
    assert check_stage_fqns(layout, plan, model) == []
    assert [sum(name in layout.layer_fqns for name in names) for names in plan] == list(counts)
    assert all(set(layout.shared) <= set(names) for names in plan)


@pytest.mark.parametrize("counts", [(), (2,), (1, 1), (2, 2), (4, -1)])
def test_counts_that_do_not_add_up(counts: tuple[int, ...], tiny: Tiny) -> None:
    layout = find_layout(tiny("llama", 3))
    with pytest.raises(ValueError, match="add up to the model's 3 layers") as caught:
        plan_stage_fqns(layout, counts)
    assert f"layer_counts={counts}" in str(caught.value)


FIRST, LAST = "model.embed_tokens", ["model.norm", "lm_head"]
L0, L1, L2 = (f"model.layers.{i}" for i in range(3))


@pytest.mark.parametrize(
    ("plan", "problems"),
    [
        ([[FIRST, L0], [L1, L2, *LAST]], []),
        ([[L0, FIRST], ["lm_head", L1, L2, "model.norm"]], []),  # a stage's list has no order
        ([[FIRST, L0, "model.rotary_emb"], [L1, L2, *LAST, "model.rotary_emb"]], []),
        ([[FIRST, L0, "model.vision_tower"], [L1, L2, *LAST]], []),
        # Missing.
        ([[FIRST, L0], [L2, *LAST]], [f"no stage lists {L1!r}"]),
        ([[L0], [L1, L2]], [f"no stage lists {name!r}" for name in (FIRST, *LAST)]),
        # Doubled, on another stage or on the same.
        ([[FIRST, L0, L1], [L1, L2, *LAST]], [f"stage 1 lists {L1!r}, which stage 0 lists already"]),
        ([[FIRST, L0, L0], [L1, L2, *LAST]], [f"stage 0 lists {L0!r}, which stage 0 lists already"]),
        # Misspelled.
        (
            [[FIRST, "model.layer.0"], [L1, L2, *LAST]],
            [
                "stage 0 lists 'model.layer.0', which the model does not have: did you mean "
                "'model.layers.0'?",
                f"no stage lists {L0!r}",
            ],
        ),
        ([["model.embed_token", FIRST, L0], [L1, L2, *LAST]], [f"did you mean {FIRST!r}?"]),
        ([[FIRST, L0, "model.layers.3"], [L1, L2, *LAST]], ["which the model does not have"]),
        ([[FIRST, L0, "quartz"], [L1, L2, *LAST]], ["lists 'quartz', which the model does not have"]),
        # A part of a module, and more than one module.
        ([[FIRST, f"{L0}.mlp", L0], [L1, L2, *LAST]], [f"a part of {L0!r}, which moves as a whole"]),
        ([["model.layers", FIRST], LAST], ["more than one module: list its parts"]),
        ([["model"], ["lm_head"]], ["'model', which is more than one module"]),
        # On the wrong stage.
        ([[L0], [FIRST, L1, L2, *LAST]], [f"stage 1 lists {FIRST!r}", "it belongs to stage 0"]),
        ([[FIRST, L0, "lm_head"], [L1, L2, "model.norm"]], ["'lm_head'", "it belongs to stage 1"]),
        # Out of order.
        ([[FIRST, L1, L0], [L2, *LAST]], ["stage 0 lists its layers out of order: [1, 0]"]),
        (
            [[FIRST, L2], [L0, L1, *LAST]],
            ["stage 1 lists layer 0, which must run before layer 2 of an earlier stage"],
        ),
        ([[FIRST, L0, L2], [L1, *LAST]], ["stage 1 lists layer 1, which must run before layer 2"]),
        ([], [f"no stage lists {name!r}" for name in (FIRST, L0, L1, L2, *LAST)]),
    ],
)  # fmt: skip
def test_check_stage_fqns(plan: list[list[str]], problems: list[str], tiny: Tiny) -> None:
    model = tiny("llama", 3)
    found = check_stage_fqns(find_layout(model), plan, model)
    assert bool(found) == bool(problems), found
    for problem in problems:
        assert any(problem in each for each in found), found


def test_all_problems_at_once(tiny: Tiny) -> None:
    model = tiny("llama", 3)
    plan = [["model.embed_tokenz", L1, L1], ["model.norm", L0, "lm_head"]]
    found = check_stage_fqns(find_layout(model), plan, model)
    text = "\n".join(found)
    for part in ("embed_tokenz", "lists already", f"{L2!r}", f"{FIRST!r}", "must run before"):
        assert part in text
