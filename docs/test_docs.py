"""Every Python block in docs and READMEs runs, examples run under torchrun, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("packages/*/*.md"),
    ]
)
# Shown as part of a program that is not on the page: names in it are explained in the text.
EXCERPTS = {"README.md": 1}


BLOCK = re.compile(r"([^\n]*)\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0")  # fmt: skip


def blocks(page: Path) -> list[tuple[bool, str]]:
    """Programs on a page, and whether the line before says that torchrun starts them."""
    found = [("torchrun" in before, block) for before, block in BLOCK.findall(page.read_text())]
    return found[EXCERPTS.get(str(page.relative_to(ROOT)), 0) :]


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    alone = [block for torchrun, block in blocks(page) if not torchrun]
    # In one process, since the imports take longest; each block with names of its own.
    run(["-c", "\n".join(f"exec({b!r}, {{'__name__': '__main__'}})" for b in alone)], tmp_path)
    for number, (torchrun, block) in enumerate(blocks(page)):
        if torchrun:
            program = tmp_path / f"block{number}.py"
            program.write_text(block)
            run([*TORCHRUN, str(program)], tmp_path)


def run_example(name: str, folder: Path) -> str:
    return run([*TORCHRUN, str(ROOT / "docs" / "examples" / name)], folder)


def test_quickstart(tmp_path: Path) -> None:
    said = run_example("quickstart.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "pipeline: 2 ranks, 2 stages" in said
    assert "model.layers.3-4, model.norm, lm_head" in said


def test_custom_model(tmp_path: Path) -> None:
    said = run_example("custom_model.py", tmp_path)
    losses = dict(re.findall(r"^(\w+): losses (.*)$", said, re.MULTILINE))
    assert len(losses) == 7
    assert len(set(losses.values())) == 1, losses


def test_custom_model_needs_pp_schedule_alone() -> None:
    text = (ROOT / "docs/examples/custom_model.py").read_text()
    assert set(re.findall(r"^(?:from|import) (pp_\w+)", text, re.MULTILINE)) == {"pp_schedule"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_schedule_names_in_docs_are_known() -> None:
    from pp_schedule import resolve_schedule

    table = (ROOT / "docs/schedules.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|([^|]*)\| `(\w+)` \|", table, re.MULTILINE)
    assert len(rows) == 7
    for first, others, class_name in rows:
        for name in re.findall(r"`([^`]+)`", first + others):
            assert resolve_schedule(name).class_name == class_name
