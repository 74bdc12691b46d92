import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig

from pp_autopipeline import PipelineConfig
from pp_recipe.cli import cli
from pp_recipe.gpus import GPUS, find_gpu
from pp_recipe.options import OptionsError
from pp_schedule import Costs, LayerCosts, load_csv, validate_order

SIZES = ["--pp", "4", "--batch-size", "8", "--seq-len", "256", "--effort", "0.2"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8000,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def settings_in(folder: Path) -> PipelineConfig:
    """The settings written, read line by line."""
    values, stages = {}, []
    for line in (folder / "pipeline.yaml").read_text().splitlines():
        if line.startswith("  - "):
            stages.append(json.loads(line[4:]))
        else:
            name, _, value = line.partition(":")
            values[name] = json.loads(value) if value else stages
    return PipelineConfig.from_dict(values)


def test_it_writes_what_to_train_with(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(model, *SIZES, "--gpu", "H100", "--memory", "80GB", "--output", str(out))
    assert result.exit_code == 0, result.output
    for part in (
        "LlamaForCausalLM: 6 layers",
        "4 ranks of 80 GB, batches of 8 x 256 tokens",
        "Chosen: ",
        "lower bound",
        "for comparison",
        "pp_batch_size: 8",
    ):
        assert part in result.output
    order = load_csv(out / "schedule.csv")
    config = settings_in(out)
    assert config.module_fqns_per_model_part is not None
    num_stages = len(config.module_fqns_per_model_part)
    assert validate_order(order, num_stages, config.num_microbatches) == []
    layers = [name for stage in config.module_fqns_per_model_part for name in stage]
    assert [name for name in layers if ".layers." in name] == [
        f"model.layers.{index}" for index in range(6)
    ]
    assert "<html" in (out / "schedule.html").read_text()
    assert len(Costs.from_json(out / "costs.json").layers) == 6


def test_the_microbatch_size_may_be_given(model: str, tmp_path: Path) -> None:
    given = ["--gpu", "a100", "--microbatch-size", "4", "--output", str(tmp_path / "out")]
    assert run(model, *SIZES, *given).exit_code == 0
    assert settings_in(tmp_path / "out").pp_microbatch_size == 4


def test_what_does_not_fit_is_said_with_what_would_help(model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = run(model, *SIZES, "--gpu", "h100", "--memory", "20MB", "--output", out)
    assert result.exit_code == 1
    assert "nothing found fits" in result.output
    assert "would help" in result.output


def test_costs_that_were_measured(model: str, tmp_path: Path) -> None:
    layers = [LayerCosts(1.0 + index, 1.0, 1.0) for index in range(6)]
    Costs(layers).to_json(tmp_path / "costs.json")
    arguments = [model, *SIZES, "--costs", str(tmp_path / "costs.json"), "--memory", "8GiB"]
    result = run(*arguments, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert Costs.from_json(tmp_path / "out" / "costs.json") == Costs(layers)
    Costs(layers[:5]).to_json(tmp_path / "costs.json")
    result = run(*arguments, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "costs has 5 layers, but LlamaForCausalLM has 6" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "--gpu h1000: did you mean h100"),
        ([], "say how fast a rank is: --gpu, --flops or --costs"),
        ([], "say how much memory a rank has: --gpu or --memory"),
        (["--gpu", "h100", "--memory", "80XB"], "--memory 80XB is no size such as 80GB"),
        (["--gpu", "h100", "--efficiency", "0"], "--efficiency 0.0 must be above 0"),
        (["--gpu", "h100", "--dtype", "int8"], "--dtype int8 is no dtype such as bfloat16"),
        (
            ["--gpu", "h100", "--microbatch-size", "3"],
            "microbatch_size=3 does not divide batch_size=8",
        ),
        (["--gpu", "h100", "--costs", "none.json"], "--costs none.json:"),
    ],
)
def test_wrong_options_are_refused(model: str, arguments: list[str], message: str) -> None:
    result = run(model, *SIZES, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_model_that_cannot_be_pipelined_is_refused() -> None:
    result = run("t5", *SIZES, "--gpu", "h100")
    assert result.exit_code == 2
    assert "Error: " in result.output


def test_gpus_have_their_names_in_any_spelling() -> None:
    assert find_gpu("A100_40GB") == GPUS["a100-40gb"]
    assert find_gpu("RTX 4090") == GPUS["rtx4090"]
    with pytest.raises(OptionsError):
        find_gpu("abacus")
