"""Weights into the stages of a pipeline and out again: what Transformers reads and writes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from harness import RankPool
from oracle import Case, build, named, token_mean
from tiny_models import tiny_model
from tiny_vlms import VisionCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pp_autopipeline import AutoPipeline, init_empty_weights
from pp_split_hf import stage_part

RATE = 0.1
TIED = {"tie_word_embeddings": True}


class Empty:
    """A case whose model has no weights."""

    def model(self) -> Any:
        with init_empty_weights():
            return super().model()  # type: ignore[misc]


@dataclass(frozen=True)
class EmptyCase(Empty, Case):
    """Of texts."""


@dataclass(frozen=True)
class EmptyVisionCase(Empty, VisionCase):
    """Of texts and images."""


def case_of(
    family: str, schedule: str, counts: tuple[int, ...], overrides: dict[str, Any]
) -> tuple[Case, Case]:
    """Return a case, and the same without weights."""
    settings = {"dtype": torch.float32, "overrides": overrides}
    if family in ("gemma3", "llava", "qwen2_vl"):
        return (
            VisionCase(family, schedule, counts, "images", **settings),
            EmptyVisionCase(family, schedule, counts, "images", **settings),
        )
    return (
        Case(family, schedule, counts, "padded", **settings),
        EmptyCase(family, schedule, counts, "padded", **settings),
    )


def loaded_trained_saved(case: Case, folder: str) -> dict[str, Any]:
    """Read, evaluate, write, train a step, write; on one rank."""
    ap = build(case)
    calls: list[tuple[int, int]] = []
    ap.load_pretrained(Path(folder, "source"), progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    loaded = state_of(ap)
    batch = case.inputs(seed=5)
    inputs = {name: value for name, value in batch.items() if name != "target"}
    logits = ap.eval(**inputs, return_outputs=True).logits
    ap.save_pretrained(Path(folder, "same"), max_shard_size=30_000)
    optimizer = torch.optim.SGD(list(ap.parameters()) or [torch.zeros(1)], lr=RATE)
    ap.step(**batch)
    optimizer.step()
    ap.save_pretrained(Path(folder, "trained"))
    return {"loaded": loaded, "logits": logits, "trained": state_of(ap)}


def state_of(ap: AutoPipeline) -> dict[str, torch.Tensor]:
    return {n: t.clone() for part in ap.parts for n, t in part.state_dict().items()}


def read(model_class: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Read a model with Transformers; nothing may be missing or left."""
    model, report = model_class.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report.values()), report
    return model


def equal(states: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    assert {name for state in states for name in state} == wanted.keys()
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("family", "schedule", "world_size", "counts", "overrides"),
    [
        ("llama", "1f1b", 2, (1, 3), {}),
        ("llama", "interleaved_1f1b", 4, (1, 0, 1, 0, 1, 1, 0, 0), {}),
        ("gpt2", "1f1b", 4, (1, 2, 1, 0), TIED),
        ("gpt2", "v_schedule", 2, (1, 0, 1, 1), TIED),
        ("qwen3_moe", "interleaved_1f1b", 2, (1, 1, 1, 1), {}),
        ("gemma3_text", "1f1b", 2, (2, 2), TIED),
        ("llava", "1f1b", 2, (1, 2), {}),
        ("qwen2_vl", "v_schedule", 2, (1, 0, 1, 1), {}),
        ("gemma3", "interleaved_1f1b", 2, (1, 1, 1, 0), {}),
    ],
)
def test_round_trip(
    ranks: RankPool, tmp_path: Path, family: str, schedule: str, world_size: int,
    counts: tuple[int, ...], overrides: dict[str, Any],
) -> None:  # fmt: skip
    case, empty = case_of(family, schedule, counts, overrides)
    made: Any = case.model()
    made.save_pretrained(tmp_path / "source", max_shard_size="50KB")
    whole = read(type(made), tmp_path / "source")
    runs = ranks.run(world_size, loaded_trained_saved, empty, str(tmp_path), timeout=120)

    equal([run["loaded"] for run in runs], whole.state_dict())
    batch = case.inputs(seed=5)
    target = batch.pop("target")
    logits = next(run["logits"] for run in runs if run["logits"] is not None)
    with torch.no_grad():
        torch.testing.assert_close(logits, whole(**batch, use_cache=False).logits)
    equal([run["loaded"] for run in runs], read(type(made), tmp_path / "same").state_dict())

    token_mean(whole.train()(**batch, use_cache=False).logits, target).backward()
    torch.optim.SGD(whole.parameters(), lr=RATE).step()
    trained = read(type(made), tmp_path / "trained").state_dict()
    equal([run["trained"] for run in runs], trained)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert any(not torch.equal(trained[n], t) for n, t in runs[0]["loaded"].items())


def made_from_nothing(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ap = build(case).materialize(seed=3)
    weights = {name: p.detach() for part in ap.parts for name, p in named(part)}
    return weights, {name: b for part in ap.parts for name, b in part.named_buffers()}


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("gpt2", TIED), ("qwen3_moe", {}), ("gemma3_text", {})]
)
def test_one_seed_gives_the_same_weights_on_any_number_of_ranks(
    ranks: RankPool, family: str, overrides: dict[str, Any]
) -> None:
    schedules = {1: ("1f1b", (4,)), 2: ("v_schedule", (1, 0, 2, 1)), 4: ("1f1b", (0, 1, 2, 1))}
    [[alone, _]] = ranks.run(
        1, made_from_nothing, EmptyCase(family, *schedules[1], overrides=overrides)
    )
    # All buffers of a model that was really made, among them tables that are not stored.
    buffers = dict(Case(family, *schedules[1], overrides=overrides).model().named_buffers())
    for world_size in (2, 4):
        case = EmptyCase(family, *schedules[world_size], overrides=overrides)
        runs = ranks.run(world_size, made_from_nothing, case)
        equal([weights for weights, _ in runs], alone)
        for _, own in runs:
            for name in own.keys() & buffers.keys():
                assert torch.equal(own[name].float(), buffers[name].float()), name
        assert set().union(*(own for _, own in runs)) >= buffers.keys()


def sharded_pipeline() -> AutoPipeline:
    """Two stages, each sharded over two ranks before it has weights."""
    with init_empty_weights():
        model = tiny_model("llama", 3, torch.float32, **TIED, vocab_size=63)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def shard(part: torch.nn.Module, **meshes: Any) -> None:
        for layer in layers_of(part):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])

    ap = AutoPipeline(mesh, pp_schedule="1f1b", pp_batch_size=4, pp_microbatch_size=2)
    return ap.build(model, loss_fn=token_mean, parallelize_fn=shard)


def sharded(folder: str) -> dict[str, Any]:
    ap = sharded_pipeline()
    ap.load_pretrained(Path(folder, "source"))
    parameters = [p for part in ap.parts for p in part.parameters()]
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in parameters)
    ap.save_pretrained(Path(folder, "same"), max_shard_size=20_000)
    batch = make_batch("plain", 4)
    batch["input_ids"] %= 63
    logits = ap.eval(batch["input_ids"], return_outputs=True).logits
    state = {n: p.full_tensor() for part in ap.parts for n, p in part.named_parameters()}
    return {"state": state, "logits": logits}


def layers_of(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
    known = stage_part(part)
    assert known is not None
    for index in range(known.first_layer, known.end_layer):
        yield part.get_submodule(known.layout.layer_fqns[index])


def test_stages_that_are_sharded_too(ranks: RankPool, tmp_path: Path) -> None:
    made = tiny_model("llama", 3, torch.float32, **TIED, vocab_size=63)
    made.save_pretrained(tmp_path / "source")
    runs = ranks.run(4, sharded, str(tmp_path), timeout=120)
    equal([run["state"] for run in runs], made.state_dict())
    again = read(type(made), tmp_path / "same")
    equal([again.state_dict()], made.state_dict())
    with torch.no_grad():
        wanted = made.eval()(make_batch("plain", 4)["input_ids"] % 63).logits
    for run in runs[2:]:
        torch.testing.assert_close(run["logits"], wanted)
