import json
import sys

import pytest
from click.testing import CliRunner

from pp_recipe.cli import cli

OWN = """
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


class ZebraConfig(PreTrainedConfig):
    model_type = "TYPE"

    def __init__(self, num_hidden_layers=3, hidden_size=16, vocab_size=50, word_multiplier=3.0,
                 score_multiplier=0.25, **kwargs):
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.word_multiplier = word_multiplier
        self.score_multiplier = score_multiplier
        super().__init__(**kwargs)


class Stripe(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tidy = nn.LayerNorm(width)
        self.twist = nn.Linear(width, width)

    def forward(self, states):
        return states + self.twist(self.tidy(states)).tanh().cumsum(1) / 8


class Zebra(PreTrainedModel):
    config_class = ZebraConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stripes = nn.ModuleList(
            [Stripe(config.hidden_size) for _ in range(config.num_hidden_layers)]
        )
        self.calm = nn.LayerNorm(config.hidden_size)
        self.scores = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids):
        states = self.words(input_ids) * self.config.word_multiplier
        BEFORE
        for stripe in self.stripes:
            states = stripe(states)
            AFTER
        return self.scores(self.calm(states)) * self.config.score_multiplier
"""
REGISTER = """
AutoConfig.register("TYPE", ZebraConfig)
AutoModelForCausalLM.register(ZebraConfig, Zebra)
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


def verify(*arguments):
    result = CliRunner().invoke(cli, ["verify", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def own_code(model_type, before="pass", after="pass", register=True):
    text = OWN + REGISTER * register
    return text.replace("TYPE", model_type).replace("BEFORE", before).replace("AFTER", after)


def folder_with(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_with_a_config_alone(tmp_path):
    result = verify(folder_with(tmp_path / "model", LLAMA))
    assert result.exit_code == 0, result.output
    first, second, head, *rows, last = result.stdout.splitlines()
    assert first.startswith("LlamaForCausalLM (a tiny copy with random weights, float32): 4 layers")
    assert second == "  4 x LlamaDecoderLayer"
    assert head.split()[:3] == ["layers", "input", "logits"]
    assert [row.split()[0] for row in rows] == ["0,4", "1,3", "2,2", "3,1", "4,0"] * 4
    kinds = ["plain", "padded left", "padded right", "packed"]
    assert [row[14:28].strip() for row in rows[::5]] == kinds
    assert all("  1         exact" in row for row in rows)
    assert last == "all 20 exact"


def test_the_head_follows_the_architecture(tmp_path):
    config = {**LLAMA, "architectures": ["LlamaForTokenClassification"]}
    result = verify(folder_with(tmp_path / "model", config), "--layers", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("LlamaForTokenClassification ")
    assert "2 layers" in result.stdout


def test_full_size(tmp_path):
    config = {**LLAMA, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    config["vocab_size"] = 300
    folder = folder_with(tmp_path / "model", config)
    result = verify(folder, "--full-size")
    assert result.exit_code == 0, result.output
    assert "full size with random weights, float32): 3 layers" in result.stdout
    both = verify(folder, "--full-size", "--layers", 2)
    assert both.exit_code == 2
    assert "--layers is for the tiny copy" in both.stderr


def test_a_model_type_with_kinds_of_layers():
    result = verify("gemma2", "--layers", 2)
    assert result.exit_code == 0, result.output
    assert "1 x Gemma2DecoderLayer (sliding_attention)" in result.stdout
    assert "1 x Gemma2DecoderLayer (full_attention)" in result.stdout


def test_an_architecture_of_ones_own(tmp_path):
    file = tmp_path / "zebras_of_ours.py"
    file.write_text(own_code("zebra"))
    result = verify("--import", file, "zebra")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Zebra (a tiny copy")
    assert "Stripe" in result.stdout
    assert "plain" in result.stdout
    assert "packed" not in result.stdout  # its forward takes ids alone
    folder = folder_with(tmp_path / "zebra", {"model_type": "zebra", "architectures": ["Zebra"]})
    assert verify(folder).exit_code == 0  # known by now
    other = folder_with(tmp_path / "other", {"model_type": "zebra", "architectures": ["Horse"]})
    refused = verify(other)
    assert refused.exit_code == 2
    assert "no model class named Horse" in refused.stderr


@pytest.mark.parametrize(("layers", "count"), [(2, 6), (6, 20)])
def test_splits_into_more_stages(layers, count, tmp_path):
    file = tmp_path / f"zebras_of_{layers}.py"
    file.write_text(own_code(f"zebra{layers}"))
    result = verify("--import", file, f"zebra{layers}", "--layers", layers, "--stages", 3)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    splits = [tuple(map(int, row[0].split(","))) for row in rows]
    twos, threes = splits[: layers + 1], splits[layers + 1 :]
    assert twos == [(cut, layers - cut) for cut in range(layers + 1)]
    assert len(threes) == len(set(threes)) == count
    assert all(sum(split) == layers and len(split) == 3 for split in threes)
    assert any(max(split) - min(split) <= 1 for split in threes)
    assert any(max(split) - min(split) > 1 for split in threes)
    assert all(row[4] == "1+1" for row in rows[layers + 1 :])


@pytest.mark.parametrize(
    ("model_type", "before", "after", "first", "stage"),
    [
        # What the last stage sums up misses the first stage's part, which only its end shows.
        ("forgetful", "seen = self.seen = []", "seen.append(states.detach())", "calm", 1),
        # Each layer is given a part of what the one before left on the model.
        ("leaning", "self.left = 0.0", "states = states + self.left; self.left = "
         "states.detach() / 2", "stripes.3.tidy", 1),
    ],
)  # fmt: skip
def test_where_an_inexact_model_goes_another_way(model_type, before, after, first, stage, tmp_path):
    text = own_code(model_type, before, after)
    if model_type == "forgetful":
        text = text.replace("self.calm(states)", "self.calm(states + sum(seen))")
    file = tmp_path / f"{model_type}_zebras.py"
    file.write_text(text)
    result = verify("--import", file, model_type, "--stages", 2)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("2,2"))
    assert "NOT EXACT" in lines[row]
    assert lines[row + 1].startswith(f"    first differs: {first} (stage {stage}), by ")
    assert "NOT EXACT" in lines[-1]


def test_remote_code_needs_trust(tmp_path):
    config = {
        "model_type": "remote_zebra",
        "architectures": ["Zebra"],
        "auto_map": {
            "AutoConfig": "modeling_zebra.ZebraConfig",
            "AutoModelForCausalLM": "modeling_zebra.Zebra",
        },
    }
    folder = folder_with(tmp_path / "remote", config)
    (folder / "modeling_zebra.py").write_text(own_code("remote_zebra", register=False))
    refused = verify(folder)
    assert refused.exit_code == 2
    assert "brings its own code" in refused.stderr
    assert "--trust-remote-code" in refused.stderr
    assert not (tmp_path / "modules").exists()
    result = verify(folder, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Zebra (a tiny copy")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("t5", ["encoder-decoder"]),
        ("bert", ["encoder-only"]),
        ("distilbert", ["encoder-only"]),
        ("qwen3_meo", ["did you mean qwen3_moe"]),
        ("nobody/nothing", ["neither a folder here", "cache of the hub"]),
        ("./no/such/folder", ["neither a folder here"]),
    ],
)
def test_what_is_refused(model, parts):
    result = verify(model)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    for part in parts:
        assert part in result.stderr


def test_a_model_without_a_list_of_layers(tmp_path):
    file = tmp_path / "smooth_zebras.py"
    file.write_text(own_code("smooth").replace("nn.ModuleList(", "nn.Sequential(*"))
    result = verify("--import", file, "smooth")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: Zebra has no list of decoder layers")


def test_folders_that_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    result = verify(empty)
    assert result.exit_code == 2
    assert "config.json" in result.stderr
    result = verify(folder_with(tmp_path / "typo", {**LLAMA, "model_type": "lama"}))
    assert result.exit_code == 2
    assert "did you mean" in result.stderr
    assert "--import" in result.stderr


def test_imports_that_are_refused(tmp_path):
    broken = tmp_path / "broken_zebras.py"
    broken.write_text("x = 1\nraise RuntimeError('no luck')\n")
    result = verify("--import", broken, "llama")
    assert result.exit_code == 2
    assert "RuntimeError: no luck (broken_zebras.py:2)" in result.stderr
    assert verify("--import", tmp_path / "none.py", "llama").exit_code == 2
    result = verify("--import", "no_such_module_of_ours", "llama")
    assert result.exit_code == 2
    assert "ModuleNotFoundError" in result.stderr
    assert "Traceback" not in result.output
