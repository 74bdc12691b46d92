"""The `autopipeline` command as a user runs it: processes, files, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

COMMAND = (sys.executable, "-m", "pp_recipe", "train", "--device", "cpu")
QUICK = ("--seq-len", "64", "--batch-size", "4")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment():
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: value for name, value in os.environ.items() if name not in torchrun}


def run(*command, timeout=120, folder=None):
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout, cwd=folder
    )


def read_losses(output):
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def load(checkpoint):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The main job as the README has it: the command, and no option at all."""
    folder = tmp_path_factory.mktemp("run")
    command = (sys.executable, "-m", "pp_recipe", "train")
    return run(*command, timeout=500, folder=folder), folder / "autopipeline-output"


def test_training_shows_its_stages_its_schedule_and_a_falling_loss(trained):
    done, output = trained
    assert done.returncode == 0, done.stderr
    losses = read_losses(output)
    assert len(losses) == 200
    assert losses[0] == pytest.approx(5.6, abs=0.3)
    assert sum(losses[-10:]) / 10 < 2.5
    for part in ("2 stages", "model.layers.0-3", "expected bubble", "step 200/200", "Try next"):
        assert part in done.stdout
    assert done.stdout.count("step 1/200") == 1
    assert "Traceback" not in done.stderr


def test_training_leaves_a_picture_and_a_checkpoint(trained):
    _, output = trained
    assert (output / "schedule.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoint",
        "metrics.jsonl",
        "schedule.png",
    ]
    model = load(output / "checkpoint")
    assert 1_000_000 <= model.num_parameters() <= 5_000_000
    logits = model(torch.arange(64)[None]).logits
    assert logits.shape == (1, 64, 256)
    assert logits.isfinite().all()


def test_one_rank_trains_the_checkpoint_further(trained, tmp_path):
    _, output = trained
    done = run(
        *COMMAND, *QUICK, "--steps", "3", "--nproc-per-node", "1",
        "--model", str(output / "checkpoint"), "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = read_losses(tmp_path / "out")[0]
    assert first < read_losses(output)[0] - 0.8
    load(tmp_path / "out" / "checkpoint")


def test_torchrun_runs_an_interleaved_schedule(tmp_path):
    done = run(
        *TORCHRUN, *COMMAND[1:], *QUICK, "--steps", "2",
        "--schedule", "interleaved_1f1b", "--output", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 stages" in done.stdout
    assert done.stdout.count("Try next") == 1
    load(tmp_path / "checkpoint")


SAVE_AND_COMPARE = """
import sys
import torch
from rich.console import Console
from pp_mesh import destroy_distributed, initialize_distributed
from pp_recipe import TrainOptions
from pp_recipe.model import build_model
from pp_recipe.train import build_pipeline, fill_pipeline

info = initialize_distributed("gloo")
options = TrainOptions(seq_len=16, batch_size=4, seed=3)
model, tokenizer = build_model(options)
pipeline = build_pipeline(options, model, info)
fill_pipeline(options, pipeline, Console(quiet=True))
ids = torch.arange(64).view(4, 16)
pipeline.step(ids, target=ids)
out = pipeline.eval(ids, target=ids, return_outputs=True)
if out.logits is not None:
    torch.save(out.logits, sys.argv[1] + "/logits.pt")
pipeline.save_pretrained(sys.argv[1] + "/checkpoint", tokenizer=tokenizer)
destroy_distributed()
"""


def test_the_checkpoint_computes_what_the_pipeline_computed(tmp_path):
    script = tmp_path / "save_and_compare.py"
    script.write_text(SAVE_AND_COMPARE)
    done = run(*TORCHRUN, str(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    logits = load(tmp_path / "checkpoint")(torch.arange(64).view(4, 16)).logits
    expected = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_from_its_latest_checkpoint_on_other_ranks(tmp_path):
    command = (
        *COMMAND,
        *QUICK,
        "--steps",
        "6",
        "--checkpoint-every",
        "2",
        "--output",
        str(tmp_path),
    )
    done = run(*command)
    assert done.returncode == 0, done.stderr
    losses = read_losses(tmp_path)
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000006"]
    shutil.rmtree(tmp_path / "checkpoints/step-00000006")  # as if killed while it was written
    done = run(*command, "--resume", "--schedule", "interleaved_1f1b")
    assert done.returncode == 0, done.stderr
    assert "step 4/6" not in done.stdout
    again = read_losses(tmp_path)
    assert again[:4] == losses[:4]
    assert again == pytest.approx(losses, rel=1e-5)
    done = run(*command, "--resume", "--nproc-per-node", "1")
    assert done.returncode == 2
    assert "--steps 6: the checkpoint has 6 already" in done.stderr


def test_nothing_to_resume_is_told_at_once(tmp_path):
    done = run(*COMMAND, "--resume", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "--resume: there is no checkpoint in" in done.stderr


def test_a_failing_rank_ends_the_run_with_one_report(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    done = run(*COMMAND, *QUICK, "--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: rank 0 failed, and the run was ended:\nTraceback")
    assert done.stderr.count("Traceback") == 1
    assert "IsADirectoryError" in done.stderr
    assert processes_that_mention(str(tmp_path)) == []


def test_ctrl_c_ends_all_ranks_quietly(tmp_path):
    process = subprocess.Popen(
        (*COMMAND, *QUICK, "--steps", "10000", "--output", str(tmp_path)),
        env=environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step 1/"):
            break
    assert len(processes_that_mention(str(tmp_path))) == 3
    # A terminal sends it to the whole foreground group.
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    said += process.communicate(timeout=30)[0]
    assert time.monotonic() - started < 10
    assert process.returncode == 130, said
    assert said.endswith("Interrupted: all ranks have ended.\n")
    assert "Traceback" not in said
    assert processes_that_mention(str(tmp_path)) == []


def processes_that_mention(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().decode(errors="replace"):
                found.append(path.parent.name)
        except OSError:
            continue  # It ended while we looked.
    return found


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--schedule", "1f1x"), "did you mean '1f1b'"),
        (("--batch-size", "7", "--microbatch-size", "2"), "does not divide"),
        (("--nproc-per-node", "9", "--batch-size", "9"), "only 8 layers"),
        (("--model", "./missing"), "no such folder"),
        (("--model", __file__), "is a file"),
        (("--model", str(Path(__file__).parent)), "no config.json"),
        (("--text", os.devnull), "too short"),
        (("--text", "./missing"), "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, options, part):
    started = time.monotonic()
    done = run(*COMMAND, "--output", str(tmp_path / "out"), *options)
    assert time.monotonic() - started < 10
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr
    assert not (tmp_path / "out").exists()
