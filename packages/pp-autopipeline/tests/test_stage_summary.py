import pytest
import torch
from torch import nn

from pp_autopipeline import StageSummary
from pp_autopipeline.stage_summary import fold_names, stage_table, summarize_stages


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        (["m.layers.0", "m.layers.1", "m.layers.2"], ["m.layers.0-2"]),
        (["m.layers.7"], ["m.layers.7"]),
        (["m.layers.0", "m.layers.2", "m.layers.3"], ["m.layers.0", "m.layers.2-3"]),
        (["m.layers.9", "m.layers.10", "m.layers.11"], ["m.layers.9-11"]),
        (["a.0", "b.1", "b.2"], ["a.0", "b.1-2"]),
        (["a.0", "x", "a.1"], ["a.0", "x", "a.1"]),
        (["a.1", "a.0"], ["a.1", "a.0"]),
        (["embed", "h.0", "h.1", "norm", "rotary"], ["embed", "h.0-1", "norm", "rotary"]),
        (["layers.0.mlp", "layers.1.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
    ],
)
def test_fold_names(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


def test_summaries_add_up() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "ab": nn.Linear(4, 5), "c": nn.Linear(5, 1)})
    model["ab"].weight.requires_grad_(False)
    summaries = summarize_stages(model, [["a"], [], ["ab", "c"]], [0, 1, 0])
    assert [s.stage_index for s in summaries] == [0, 1, 2]
    assert [s.rank for s in summaries] == [0, 1, 0]
    assert [s.num_params for s in summaries] == [16, 0, 25 + 6]
    assert [s.num_trainable_params for s in summaries] == [16, 0, 5 + 6]
    assert [s.share for s in summaries] == pytest.approx([16 / 47, 0, 31 / 47])
    assert summaries[2].modules == ("ab", "c")
    assert summaries[2].folded_modules == ["ab", "c"]


def test_summaries_need_no_weights() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(1000, 1000)})
    [summary] = summarize_stages(model, [["a"]], [0])
    assert summary.num_params == 1_001_000
    [summary] = summarize_stages(nn.Identity(), [["a"]], [0])
    assert (summary.num_params, summary.share) == (0, 0.0)


def test_table() -> None:
    summaries = [
        StageSummary(0, 0, ("embed", "h.0", "h.1", "rotary"), 1234567, 0, 0.75),
        StageSummary(1, 1, ("h.2", "norm", "head"), 9, 9, 0.25),
    ]
    assert stage_table(summaries, 16).splitlines() == [
        "stage  rank  parameters   share  modules",
        "    0     0   1,234,567  75.0 %  embed, h.0-1, rotary",
        "    1     1           9  25.0 %  h.2, norm, head",
    ]
    assert stage_table(summaries, 2).splitlines()[1:] == [
        "    0     0   1,234,567  75.0 %  embed, h.0-1, and 1 more",
        "    1     1           9  25.0 %  h.2, norm, and 1 more",
    ]
