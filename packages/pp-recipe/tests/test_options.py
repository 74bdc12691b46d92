import json
import struct

import pytest

from pp_recipe import OptionsError, TrainOptions

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def problems(**options):
    with pytest.raises(OptionsError) as caught:
        TrainOptions(**options).check()
    return caught.value.problems


def test_the_defaults_are_sound(tmp_path):
    TrainOptions(output=str(tmp_path / "out")).check()


def test_json_brings_the_options_back():
    options = TrainOptions(model="m", steps=3, learning_rate=0.1)
    assert TrainOptions.from_json(options.to_json()) == options


def test_a_trained_model_gets_a_lower_learning_rate():
    assert TrainOptions(model="m").peak_learning_rate < TrainOptions().peak_learning_rate
    assert TrainOptions(learning_rate=0.5).peak_learning_rate == 0.5


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"schedule": "1f1x"}, ["--schedule", "'1f1x'", "did you mean '1f1b'"]),
        (
            {"batch_size": 7, "microbatch_size": 2},
            ["--batch-size 7", "--microbatch-size 2", "6 or 8"],
        ),
        ({"batch_size": 2, "microbatch_size": 4}, ["--batch-size 2", "batch size of 4"]),
        ({"steps": 0}, ["--steps 0 must be at least 1"]),
        ({"nproc_per_node": -1}, ["--nproc-per-node -1 must be at least 1"]),
        ({"seed": -1}, ["--seed -1 must be at least 0"]),
        ({"learning_rate": 0.0}, ["--learning-rate 0.0 must be above 0"]),
        (
            {"nproc_per_node": 9, "batch_size": 9},
            ["--nproc-per-node 9", "9 stages", "only 8 layers", "at most --nproc-per-node 8"],
        ),
        (
            {"nproc_per_node": 5, "schedule": "interleaved_1f1b", "batch_size": 10},
            ["10 stages", "only 8 layers", "at most --nproc-per-node 4"],
        ),
        (
            {"batch_size": 2, "nproc_per_node": 4},
            ["--batch-size 2 in microbatches of 1", "at least one microbatch per stage (4)"],
        ),
        (
            {"layers_per_stage": 3},
            ["--layers-per-stage 3", "8 layers", "2 ranks", "1f1b", "use 4, or leave it out"],
        ),
        (
            {"layers_per_stage": 8, "schedule": "interleaved_1f1b"},
            ["--layers-per-stage 8", "use 1 or 2, or leave it out"],
        ),
        ({"model": "./missing"}, ["--model ./missing", "no such folder"]),
        ({"text": "./missing.txt"}, ["--text ./missing.txt cannot be read"]),
        ({"seq_len": 10_000_000}, ["built-in text is too short", "--seq-len 10000000"]),
    ],
)
def test_each_problem_is_one_sentence_with_what_was_typed(tmp_path, options, parts):
    found = problems(output=str(tmp_path / "out"), **options)
    assert len(found) == 1
    for part in parts:
        assert part in found[0]


def test_all_problems_are_told_at_once():
    found = problems(schedule="nope", batch_size=3, microbatch_size=2, model="./missing")
    assert len(found) == 3


def test_a_short_text_names_the_length_it_has(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("x" * 20)
    (found,) = problems(text=str(short), seq_len=32)
    assert f"--text {short} is too short: it has 20 tokens" in found
    assert "needs 33" in found
    assert "at most 19" in found


def test_under_torchrun_its_world_counts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9")
    (found,) = problems(nproc_per_node=1, batch_size=9)
    assert "9 stages" in found


def test_output_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (found,) = problems(output=str(tmp_path / "file"))
    assert "is a file" in found


def test_a_foreign_folder_named_checkpoint_is_kept(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (found,) = problems(output=str(tmp_path))
    assert "would be replaced" in found


def test_a_sound_checkpoint_passes(checkpoint):
    TrainOptions(model=str(checkpoint), output=str(checkpoint.parent / "out")).check()


def test_a_text_config_inside_the_config_is_read(checkpoint):
    (checkpoint / "config.json").write_text(
        '{"model_type": "llama", "text_config": {"num_hidden_layers": 2}}'
    )
    (found,) = problems(model=str(checkpoint), nproc_per_node=3)
    assert "only 2 layers" in found


def test_a_sequence_longer_than_the_positions_is_refused(checkpoint):
    (found,) = problems(model=str(checkpoint), seq_len=512)
    assert "--seq-len 512 is longer than the 256 positions" in found


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"not json", "config.json is not JSON"),
        ("config.json", b"[1]", "config.json holds no settings"),
        ("config.json", b"{}", "names no number of layers"),
        (
            "config.json",
            b'{"num_hidden_layers": 2, "model_type": "lama"}',
            "model_type 'lama', for which the installed Transformers has no causal",
        ),
        (
            "config.json",
            b'{"is_encoder_decoder": true, "num_layers": 2}',
            "is an encoder-decoder model",
        ),
        ("tokenizer.json", None, "has no tokenizer"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", b"", "model.safetensors is no safetensors file"),
        ("model.safetensors", b"just some words", "model.safetensors is no safetensors file"),
        ("model.safetensors", WEIGHTS[:-1], "model.safetensors is cut short"),
    ],
)
def test_what_is_no_checkpoint_is_told_from_its_files(checkpoint, name, content, part):
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    (found,) = problems(model=str(checkpoint))
    assert found.startswith(f"--model {checkpoint}: ")
    assert part in found


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "model-1.safetensors"}}',
            "model.safetensors.index.json lists model-1.safetensors, which is missing",
        ),
        ("pytorch_model.bin", b"", "has its weights in pickles"),
    ],
)
def test_weights_in_other_files(checkpoint, name, content, part):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(content)
    (found,) = problems(model=str(checkpoint))
    assert part in found


def test_a_file_is_no_model(checkpoint):
    file = checkpoint / "config.json"
    (found,) = problems(model=str(file))
    assert f"--model {file}: is a file" in found


def test_an_unknown_hub_id_is_told_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (found,) = problems(model="nobody/nothing")
    assert "--model nobody/nothing: is neither a folder here nor a model of the" in found
