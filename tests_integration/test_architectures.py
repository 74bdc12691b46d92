"""Every architecture is exact when cut anywhere, or refused with the reason; none is ever wrong.

Tiny random models of the decoder architectures of Transformers, whole against chained stages in
one process: every cut into two and three stages in every place; plain, padded (left and right) and
packed inputs; training and evaluation mode; logits and all gradients. With
`PP_ALL_ARCHITECTURES=1` the whole causal-LM mapping runs, else a selection. What was found is
written to the folder `PP_ARCHITECTURE_TABLE`, if that is set; `architecture_table.py` makes a page
of it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from architectures import ROWS, all_names, model_of, packed, padded, without_dropout

from pp_patch_hf import verify_pipeline
from pp_split_hf import (
    ModelLayout,
    check_pipeline_support,
    find_layout,
    plan_stage_fqns,
    split_model_into_stages,
)

RTOL = 1e-5
# What is refused, or cannot be built here, and by which words; everything else must be exact.
REFUSED = {
    "blt": "no list of decoder layers",  # three stacks, of bytes, patches and bytes again
    "hrm_text": "runs again after",  # two stacks that run in turns
    "mllama": "never runs model.layers",  # layers that run for images alone
    "xlm": "cannot follow the forward",  # decides by the lengths of texts
}
NOT_BUILT = {
    "gemma3n": "timm",
    "gemma4_assistant": "validate_architecture",
    "gemma4_unified_assistant": "shared_kv_states cannot be None",  # a part of another model
    "reformer": "If you want to train",
}
# Draws experts at random in training mode, in stages as in the whole, but other ones.
RANDOM_ROUTING = ("phimoe",)
# One for each way in which an architecture differs: positions, multipliers, hidden shapes, layers
# that return tuples or lists, recurrences, experts, embeddings that are more than a table.
SELECTION = (
    "bloom", "cohere2", "ctrl", "deepseek_v4", "falcon_h1", "gpt_neox", "gpt_oss", "jamba", "lfm2",
    "mamba2", "minicpm3", "modernbert-decoder", "openai-gpt", "opt", "phi", "recurrent_gemma",
    "rwkv", "xglm", "cpmant", "dbrx", "dory", "gemma3n_text", "gemma4_text", "glm_moe_dsa",
    "hy_v4", "inkling2_text", "inkling2_loop_text", "longcat_flash", "zamba", "zamba2", "xlnet",
    "zaya", *REFUSED,
)  # fmt: skip
NAMES = all_names() if os.environ.get("PP_ALL_ARCHITECTURES") else sorted(SELECTION)


@dataclass
class Finding:
    """What came of one architecture."""

    name: str
    verdict: str
    """"exact", "refused", "not built" or "WRONG"."""
    reason: str = ""
    carried: int = 0
    """The most tensors that cross a boundary beside the hidden states."""
    num_cuts: int = 0
    error: float = 0.0


def examine(name: str) -> Finding:
    """Build a model, cut it everywhere, compare."""
    try:
        model = model_of(name)
    except Exception as error:
        return Finding(name, "not built", f"{type(error).__name__}: {str(error).strip()[:300]}")
    try:
        layout = find_layout(model)
    except (ValueError, RuntimeError) as error:
        return Finding(name, "refused", str(error))
    problems = check_pipeline_support(model, layout)
    if problems:
        return Finding(name, "refused", "; ".join(problems))
    carried = max(len(crossing.slots) for crossing in layout.trace.crossings) - 1
    finding = Finding(name, "exact", "", carried, len(layout.trace.cuts))
    check_names(model, layout)
    for kind, training, splits, inputs in runs_of(name, model, layout):
        if training:
            without_dropout(model)
        report = verify_pipeline(model.train(training), splits, inputs, RTOL, layout)
        errors = [e for cut in report.cuts for e in (cut.logits_error, cut.gradient_error)]
        finding.error = max(finding.error, *errors)
        if not report.exact:
            finding.verdict, finding.reason = "WRONG", f"{kind}, training={training}\n{report}"
            break
    return finding


Splits = list[tuple[int, ...]]
Inputs = dict[str, torch.Tensor] | None


def runs_of(
    name: str, model: torch.nn.Module, layout: ModelLayout
) -> list[tuple[str, bool, Splits, Inputs]]:
    """Return kinds of inputs, modes and splits: each of them with each place at least once."""
    takes = ROWS[name]["takes_position_ids"] if name in ROWS else False
    two, three = splits_of(layout)
    three = three or two
    right_and_left = padded({"takes_position_ids": takes})
    runs: list[tuple[str, bool, Splits, Inputs]] = [
        ("plain", False, two + three, None),
        ("padded", False, two, right_and_left),
    ]
    if takes:
        runs.append(("packed", False, three, packed()))
    if name not in RANDOM_ROUTING:
        runs.append(("padded", True, three, right_and_left))
    return runs


def splits_of(layout: ModelLayout) -> tuple[Splits, Splits]:
    """Return every cut into two, and cuts into three that have each place once more."""
    cuts, end = layout.trace.cuts, layout.num_layers
    inner = [cut for cut in cuts if 0 < cut < end]
    half = (len(inner) + 1) // 2
    pairs = zip(inner[:half], inner[-half:], strict=True)
    three: Splits = [(first, second - first, end - second) for first, second in pairs]
    return [(cut, end - cut) for cut in cuts], three


def check_names(model: torch.nn.Module, layout: ModelLayout) -> None:
    """The stages' state dicts together are the model's, and nothing is in two of them but ties."""
    two, three = splits_of(layout)
    counts = (three or two)[-1]
    plan = plan_stage_fqns(layout, counts)
    parts = split_model_into_stages(model, plan, range(len(plan)), layout)
    shared = {
        name for fqn in layout.shared for name in model.state_dict() if name.startswith(f"{fqn}.")
    }
    names = [name for part in parts for name in part.state_dict() if name not in shared]
    assert len(names) == len(set(names)), "a name is in two stages"
    assert {*names, *shared} == set(model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(name: str) -> None:
    finding = examine(name)
    if folder := os.environ.get("PP_ARCHITECTURE_TABLE"):
        Path(folder, f"{name}.json").write_text(json.dumps(asdict(finding)))
    if name in REFUSED:
        assert finding.verdict == "refused"
        assert REFUSED[name] in finding.reason
    elif name in NOT_BUILT:
        assert finding.verdict == "not built"
        assert NOT_BUILT[name] in finding.reason
    else:
        assert finding.verdict == "exact", finding.reason
