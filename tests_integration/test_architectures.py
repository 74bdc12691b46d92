"""Every architecture is exact when cut anywhere, or refused with the reason; none is ever wrong.

Tiny random models of decoder architectures of Transformers, whole against chained stages in one
process: every cut into two, three stages, plain and padded (left and right) inputs, logits and all
gradients. With `PP_ALL_ARCHITECTURES=1` all of them run, else a selection.
"""

import os

import pytest
from architectures import ROWS, make_model, padded

from pp_patch_hf import verify_pipeline
from pp_split_hf import check_pipeline_support, find_layout

# Two stacks of layers that run in turns, each several times: no layer can be cut off.
REFUSED = {"hrm_text": "runs again after"}
# One for each way in which an architecture differs: positions, multipliers, hidden shapes, layers
# that return tuples or lists, recurrences, experts, embeddings that are more than a table.
SELECTION = (
    "bloom", "cohere2", "ctrl", "deepseek_v4", "falcon_h1", "gpt_neox", "gpt_oss", "jamba", "lfm2",
    "mamba2", "minicpm3", "modernbert-decoder", "openai-gpt", "opt", "phi", "recurrent_gemma",
    "rwkv", "xglm", "cpmant", "dbrx", "dory", "gemma3n_text", "gemma4_text", "glm_moe_dsa",
    "hy_v4", "inkling2_text", "inkling2_loop_text", "longcat_flash", "zamba", "zamba2", *REFUSED,
)  # fmt: skip
NAMES = (
    sorted(ROWS) if os.environ.get("PP_ALL_ARCHITECTURES") else sorted(set(SELECTION) & set(ROWS))
)


@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(name: str) -> None:
    row = ROWS[name]
    model = make_model(row)
    problems = check_pipeline_support(model)
    if name in REFUSED:
        assert any(REFUSED[name] in problem for problem in problems), problems
        return
    assert problems == []
    trace = find_layout(model).trace
    num_layers = len(trace.crossings) - 1
    splits = [(cut, num_layers - cut) for cut in trace.cuts]
    inner = [cut for cut in trace.cuts if 0 < cut < num_layers]
    splits.append((inner[0], inner[-1] - inner[0], num_layers - inner[-1]))
    for inputs in (None, padded(row)):
        report = verify_pipeline(model, splits=splits, inputs=inputs, rtol=1e-5)
        assert report.exact, f"\n{report}"
