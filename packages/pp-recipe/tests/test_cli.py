import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner

from pp_recipe import TrainOptions
from pp_recipe.cli import cli


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_help_names_every_option_and_imports_no_torch():
    code = (
        "import sys, pp_recipe.cli as c\n"
        "try: c.cli(['train', '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
    for field in fields(TrainOptions):
        assert f"--{field.name.replace('_', '-')} " in run.stdout


def test_bad_input_is_one_line_and_code_2():
    result = CliRunner().invoke(cli, ["train", "--schedule", "1f1x"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --schedule: there is no schedule '1f1x'")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_two_problems_are_two_lines():
    result = CliRunner().invoke(cli, ["train", "--steps", "0", "--seed", "-3"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2


def test_under_torchrun_one_rank_alone_complains(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(cli, ["train", "--steps", "0"])
    assert result.exit_code == 2
    assert result.stderr == ""
