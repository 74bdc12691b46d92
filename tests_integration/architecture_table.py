"""Makes docs/architectures.md from what test_architectures.py found."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

HEAD = """# Architectures

Every decoder of Transformers {transformers}'s causal-LM mapping, as a tiny random model with its kinds of layers and options, cut into two and three stages in every place, against the unsplit model in one process: logits and every gradient, plain, padded and (where the model takes positions) packed inputs, in training and evaluation mode, float32, torch {torch}. Written by `uv run nox -s parity -- --all`.

{exact} of {total} are exact, {carry} of them with tensors that cross beside the hidden states; {refused} refused with the reason; {not_built} could not be built here alone. The largest relative error is {error:.0e}. None is wrong without a word.

- *places*: where the model can be cut, the two ends included.
- *carried*: the most tensors that cross one boundary beside the hidden states.

| model type | verdict | places | carried | largest error |
|---|---|---|---|---|
"""


def page(findings: list[dict[str, Any]]) -> str:
    """Return the page."""
    verdicts = [finding["verdict"] for finding in findings]
    exact = [finding for finding in findings if finding["verdict"] == "exact"]
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        exact=len(exact),
        total=len(findings),
        carry=sum(finding["carried"] > 0 for finding in exact),
        refused=verdicts.count("refused"),
        not_built=verdicts.count("not built"),
        error=max(finding["error"] for finding in exact),
    )
    for finding in findings:
        if finding["verdict"] == "exact":
            carried = finding["carried"] or ""
            text += (
                f"| {finding['name']} | exact | {finding['num_cuts']} | {carried} | "
                f"{finding['error']:.0e} |\n"
            )
        else:
            reason = " ".join(finding["reason"].split()).replace("|", "/")[:300]
            text += f"| {finding['name']} | {finding['verdict']}: {reason} | | | |\n"
    return text


if __name__ == "__main__":
    folder, target = map(Path, sys.argv[1:])
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    target.write_text(page(sorted(found, key=lambda finding: finding["name"])))
