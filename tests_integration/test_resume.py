"""Training that is resumed, on another cut too, goes on as if it had never stopped."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from harness import RankPool
from oracle import LEARNING_RATE, MAX_NORM, Case, build, make_optimizer, named, token_mean
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from pp_autopipeline import AutoPipeline, clip_grad_norm
from pp_autopipeline.checkpoints import Checkpoints

STEPS = 6
TIED = {"tie_word_embeddings": True}


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def make(case: Case) -> tuple[AutoPipeline, torch.optim.Optimizer, LambdaLR]:
    ap = build(case)
    optimizer = make_optimizer(ap.parts, case.dtype)
    return ap, optimizer, schedule(optimizer)


def train(
    ap: AutoPipeline, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, start: int, end: int
) -> list[float]:
    losses = []
    for step in range(start, end):
        loss = ap.step(**make_batch("plain", 8, seed=20 + step)).loss
        assert loss is not None
        clip_grad_norm(MAX_NORM, ap.parts, device_mesh=ap.world_mesh)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state(ap: AutoPipeline, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state under all of their names."""
    found = {}
    for part in ap.parts:
        for name, parameter in named(part):
            found[name] = parameter.detach().clone()
            for key, value in optimizer.state[parameter].items():
                found[f"{name} {key}"] = value.clone()
    return found


def whole_run(case: Case, folder: str, asynchronous: bool) -> tuple[list[float], dict[str, Any]]:
    """All steps; half of them are saved on the way."""
    ap, optimizer, scheduler = make(case)
    with Checkpoints(folder) as checkpoints:
        losses = train(ap, optimizer, scheduler, 0, STEPS // 2)
        checkpoints.save(
            STEPS // 2, ap, optimizer, scheduler, data=losses, asynchronous=asynchronous
        )
        losses += train(ap, optimizer, scheduler, STEPS // 2, STEPS)
    return losses, state(ap, optimizer)


def resumed_run(case: Case, folder: str) -> tuple[list[float], dict[str, Any]]:
    ap, optimizer, scheduler = make(case)
    with torch.no_grad():  # so that nothing is right by itself
        for parameter in ap.parameters():
            parameter.fill_(7.0)
    resumed = Checkpoints(folder).load(ap, optimizer, scheduler)
    assert len(resumed.data) == resumed.step == STEPS // 2
    assert scheduler.last_epoch == resumed.step
    assert scheduler.get_last_lr() == [LEARNING_RATE / (1 + resumed.step)]
    return train(ap, optimizer, scheduler, resumed.step, STEPS), state(ap, optimizer)


UNEVEN = Case("llama", "1f1b", (1, 3))
WHOLE = Case("llama", "1f1b", (4,))
TIED_OVER_TWO = Case("gpt2", "1f1b", (3, 1), overrides=TIED)
TIED_ON_ONE = Case("gpt2", "1f1b", (4,), overrides=TIED)
MOVES = {
    "2 to 1": (UNEVEN, 2, WHOLE, 1, False),
    "1 to 2": (WHOLE, 1, UNEVEN, 2, True),
    "1f1b to interleaved": (UNEVEN, 2, Case("llama", "interleaved_1f1b", (2, 0, 1, 1)), 2, True),
    "2 to 4": (UNEVEN, 2, Case("llama", "v_schedule", (0, 1, 1, 0, 1, 0, 1, 0)), 4, False),
    "tied over two to one": (TIED_OVER_TWO, 2, TIED_ON_ONE, 1, False),
    "tied on one to two": (TIED_ON_ONE, 1, TIED_OVER_TWO, 2, False),
    "tied over two to two stages of one": (
        TIED_OVER_TWO, 2, Case("gpt2", "v_schedule", (1, 1, 1, 1), overrides=TIED), 2, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_resuming_elsewhere(ranks: RankPool, tmp_path: Path, move: str) -> None:
    before, size_before, after, size_after, asynchronous = MOVES[move]
    wholes = ranks.run(size_before, whole_run, before, str(tmp_path), asynchronous)
    resumed = ranks.run(size_after, resumed_run, after, str(tmp_path))
    for losses, _ in resumed:
        assert losses == pytest.approx(wholes[0][0][STEPS // 2 :], rel=1e-9)
    wanted = {name: tensor for _, tensors in wholes for name, tensor in tensors.items()}
    got = {name: tensor for _, tensors in resumed for name, tensor in tensors.items()}
    assert got.keys() == wanted.keys()
    assert any(name.endswith(" exp_avg_sq") for name in got)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-8, atol=1e-10, msg=name)


def sharded_run(folder: str) -> list[float]:
    """Two pipeline ranks, each stage sharded over two; the loss after resuming is the next one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ap = AutoPipeline(
        mesh, pp_microbatch_size=2, pp_batch_size=8
    ).build(
        UNEVEN.model(), loss_fn=token_mean,
        parallelize_fn=lambda part, world_mesh, *_, **__: fully_shard(part, mesh=world_mesh["dp"]),
    )  # fmt: skip
    optimizer = make_optimizer(ap.parts, torch.float64)
    scheduler = schedule(optimizer)
    losses = train(ap, optimizer, scheduler, 0, STEPS // 2)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(STEPS // 2, ap, optimizer, scheduler, losses, asynchronous=True)
        losses += train(ap, optimizer, scheduler, STEPS // 2, STEPS)
        checkpoints.load(ap, optimizer, scheduler)
        again = train(ap, optimizer, scheduler, STEPS // 2, STEPS)
    assert again == pytest.approx(losses[STEPS // 2 :], rel=1e-9)
    return losses


def test_a_sharded_pipeline_resumes_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    losses = ranks.run(4, sharded_run, str(tmp_path))[0]
    [(resumed, _)] = ranks.run(1, resumed_run, WHOLE, str(tmp_path))
    assert resumed == pytest.approx(losses[STEPS // 2 :], rel=1e-9)


class Small(nn.Module):
    """A frozen weight, one without gradients, buffers, and two dtypes."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        torch.manual_seed(hidden)
        self.first = nn.Linear(3, hidden)
        self.frozen = nn.Linear(hidden, hidden).requires_grad_(False)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 2, dtype=torch.bfloat16)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.frozen(self.first(x))).bfloat16()).float().square().mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases apart; the names of everything in one group differ from those of the other."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.01},
    ]


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.1),
    "amsgrad": lambda g: torch.optim.Adam(g, lr=0.1, amsgrad=True, foreach=True),
    "fused": lambda g: torch.optim.AdamW(g, lr=0.1, fused=True),
    "tensor rate": lambda g: torch.optim.AdamW(g, lr=torch.tensor(0.1)),
    "adafactor": lambda g: torch.optim.Adafactor(g, lr=0.1),
    "float32 moments": lambda g: WideMomentum(g, {"lr": 0.1}),
}


class WideMomentum(torch.optim.Optimizer):
    """Keeps float32 moments of bfloat16 weights, and counts in a plain number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    moment = state.get("moment", torch.zeros_like(p, dtype=torch.float32))
                    state["moment"] = moment.mul(0.9).add(p.grad.float())
                    state["count"] = state.get("count", 0) + 1
                    p.add_(state["moment"].to(p.dtype), alpha=-group["lr"] / state["count"])


def small_steps(model: Small, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(torch.rand(5, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def every_optimizer(folder: str) -> None:
    for kind, make_it in OPTIMIZERS.items():
        model = Small()
        optimizer = make_it(groups(model))
        small_steps(model, optimizer, 3)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2
        checkpoints = Checkpoints(Path(folder, kind))
        checkpoints.save(3, [model], optimizer)
        losses = small_steps(model, optimizer, 3)
        # Random inputs go on where they were, too.
        fresh = Small()
        with torch.no_grad():
            for tensor in fresh.state_dict().values():
                tensor.fill_(3)
        other = make_it(groups(fresh)[::-1])
        checkpoints.load([fresh], other)
        assert small_steps(fresh, other, 3) == losses, kind
        rates = {type(g["lr"]) for g in (optimizer.param_groups[0], other.param_groups[1])}
        assert rates == {torch.Tensor if kind == "tensor rate" else float}
        for name, tensor in fresh.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), (kind, name)
        held = dict(model.named_parameters())
        for name, parameter in fresh.named_parameters():
            mine, theirs = optimizer.state[held[name]], other.state[parameter]
            assert mine.keys() == theirs.keys(), (kind, name)
            for key, value in mine.items():
                if isinstance(value, torch.Tensor):
                    assert (value.dtype, value.device) == (theirs[key].dtype, theirs[key].device)
                    assert torch.equal(value, theirs[key]), (kind, name, key)


def test_every_kind_of_optimizer_state(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, every_optimizer, str(tmp_path))


class Numbers:
    """A loader that says where it is."""

    def __init__(self) -> None:
        self.place: dict[Any, Any] = {"epoch": 2, 7: (1, torch.arange(3))}

    def state_dict(self) -> dict[Any, Any]:
        return self.place

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.place = state


def streams(folder: str) -> tuple[Any, Any]:
    """What comes next at save, and after loading."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(100 + dist.get_rank())
    checkpoints, numbers = Checkpoints(folder), Numbers()
    next_ones = None
    if dist.get_world_size() == 2:
        checkpoints.save(0, [model], optimizer, data=numbers)
        next_ones = random.random(), numpy.random.rand(), torch.rand(()).item()
    numbers.place = {}
    checkpoints.load([model], optimizer, data=numbers)
    assert numbers.place["epoch"] == 2
    assert numbers.place[7][1].tolist() == [0, 1, 2]
    return next_ones, (random.random(), numpy.random.rand(), torch.rand(()).item())


def test_random_streams_and_the_data_position(ranks: RankPool, tmp_path: Path) -> None:
    two = ranks.run(2, streams, str(tmp_path))
    assert all(before == after for before, after in two)
    assert two[0] != two[1]
    three = ranks.run(3, streams, str(tmp_path))
    assert [after for _, after in three[:2]] == [after for _, after in two]
    torch.manual_seed(102)
    assert three[2][1][2] == torch.rand(()).item()  # its own, as it was


def refusals(folder: str) -> dict[str, tuple[str, str]]:
    """What each load that cannot be says; none of them changes anything."""
    checkpoints, found = Checkpoints(folder), {}

    def attempt(
        kind: str, model: nn.Module, optimizer: Any, scheduler: Any = None, step: int | None = None
    ) -> None:
        before = {name: t.clone() for name, t in model.state_dict().items()}
        try:
            checkpoints.load([model], optimizer, scheduler, step=step)
        except (ValueError, FileNotFoundError) as error:
            found[kind] = type(error).__name__, str(error)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    model = Small()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    attempt("nothing there", model, optimizer)
    checkpoints.save(1, [model], optimizer)
    wide, torn = Small(5), Small()
    del torn.frozen
    # Only one rank has another model; both have to say so.
    odd = dist.get_rank() == dist.get_world_size() - 1
    attempt("another width", wide if odd else model, sgd(wide) if odd else optimizer)
    attempt("missing here", torn, torch.optim.SGD(groups(torn), lr=0.1))
    attempt("another model", nn.Sequential(nn.Linear(2, 2)), sgd(nn.Linear(2, 2)))
    attempt("dtype", Small().bfloat16(), torch.optim.SGD(groups(model), lr=0.1))
    attempt("one group", model, sgd(model))
    attempt("another optimizer", model, torch.optim.AdamW(groups(model)))
    attempt("a scheduler", model, optimizer, schedule(optimizer))
    attempt("no such step", model, optimizer, step=7)
    less = torch.optim.SGD(model.first.parameters(), lr=0.1)
    attempt("less is trained", model, less)
    try:
        checkpoints.save(2, [model], optimizer, data=lambda: 3)
    except ValueError as error:
        found["data"] = "ValueError", str(error)
    try:
        checkpoints.save(2 + dist.get_rank(), [model], optimizer)
    except ValueError as error:
        found["steps"] = "ValueError", str(error)
    assert checkpoints.steps() == [1]
    return found


def test_what_cannot_be_resumed(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, refusals, str(tmp_path))
    assert first == second
    assert first["nothing there"][0] == first["no such step"][0] == "FileNotFoundError"
    assert "no complete checkpoint of step 7" in first.pop("no such step")[1]
    first.pop("nothing there")
    assert {kind for kind, _ in first.values()} == {"ValueError"}
    for kind, words in {
        "another width": "first.weight has shape [4, 3] in the checkpoint and [5, 3] here",
        "missing here": "frozen.weight is only in the checkpoint",
        "another model": "is not of this model",
        "dtype": "first.weight is torch.float32 in the checkpoint and torch.bfloat16 here",
        "one group": "were trained with weight_decay=0.1 and weight_decay=0",
        "another optimizer": "the optimizer was SGD and is AdamW",
        "a scheduler": "a scheduler is only here",
        "less is trained": "last.bias is in an optimizer only in the checkpoint",
        "data": "data cannot be saved",
        "steps": "the ranks gave different steps: [2, 3]",
    }.items():
        assert words in first[kind][1], first[kind][1]
        assert len(first[kind][1].splitlines()) <= 12


def kept(folder: str) -> list[list[int]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints, seen = Checkpoints(folder, keep_last=2, keep_every=4), []
    for step in (1, 2, 3, 4, 5, 6, 3, 6):
        checkpoints.save(step, [model], optimizer, data=step, asynchronous=step % 2 == 0)
        checkpoints.wait()
        assert checkpoints.latest() == step
        assert checkpoints.load([model], optimizer).data == step
        seen.append(checkpoints.steps())
    Path(folder, "latest").unlink()
    assert checkpoints.latest() == 6
    Path(folder, "latest").write_text("step-00000009\n")
    assert checkpoints.latest() == 6
    next(Path(folder, "step-00000006").glob("*.distcp")).write_bytes(b"cut off")
    assert checkpoints.latest() == 3  # saved after 4 and 5
    return seen


def test_which_checkpoints_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    [seen] = ranks.run(1, kept, str(tmp_path))
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [3, 4, 6], [3, 4, 6]]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "latest") == [
        "step-00000003", "step-00000004", "step-00000006",
    ]  # fmt: skip
    for wrong, words in (({"keep_last": 0}, "keep_last=0"), ({"keep_every": 5}, "give keep_last")):
        with pytest.raises(ValueError, match=words):
            Checkpoints(tmp_path, **wrong)


def overlapping(folder: str) -> None:
    """Each save in the background has what was there when it was called."""
    layer = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder)
    with torch.no_grad():
        for step in range(1, 4):
            layer.weight.fill_(step)
            checkpoints.save(step, [layer], optimizer, asynchronous=True)
            layer.weight.fill_(-1)
        for step in range(1, 4):
            assert checkpoints.load([layer], optimizer, step=step).step == step
            assert (layer.weight == step).all()


def test_saves_that_overlap(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, overlapping, str(tmp_path))
