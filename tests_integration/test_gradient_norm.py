"""One gradient norm for stages, shards and experts on several meshes: that of one process."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pp_mesh import Meshes, ParallelSizes, build_mesh
from pp_schedule import clip_grad_norm, mark_shards, scale_grads_by_divisor

MAX_NORM = 0.25
EXPERTS = 4
# Five rows do not divide over two ranks: one has three of them; of the single row one has none.
DENSE = {"a": (5, 3), "b": (1, 4), "c": (6,)}
ROUTED = {"up": (EXPERTS, 3, 2), "down": (EXPERTS, 2)}
NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


class Weights(nn.Module):
    """Parameters whose gradients are given: the output is their inner product with them."""

    def __init__(self, gradients: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        for name, gradient in gradients.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(gradient)))

    def forward(self) -> torch.Tensor:
        values = [(local(p) * self.gradients[name]).sum() for name, p in self.named_parameters()]
        return torch.stack(values).sum()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(stage: int, shapes: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + stage + len(shapes))
    return {
        name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def everything(num_stages: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The gradients of the whole model."""
    return {
        f"{stage}.{name}": gradient.clone()
        for stage in range(num_stages)
        for shapes in (DENSE, ROUTED)
        for name, gradient in gradients(stage, shapes, dtype).items()
    }


def clipped(whole: dict[str, torch.Tensor], norm_type: float) -> tuple[float, dict[str, Any]]:
    """The norm of one process, and its gradients after clipping."""
    norm = torch.cat([g.double().flatten() for g in whole.values()]).norm(norm_type)
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    return norm.item(), {name: g.double() * factor for name, g in whole.items()}


def make_part(kind: str, meshes: Meshes, dtype: torch.dtype) -> nn.ModuleDict:
    """This rank's stage: dense weights under FSDP, experts under EP and FSDP."""
    world, moe = meshes
    stage = world["pp"].get_local_rank()
    dense = Weights(gradients(stage, DENSE, dtype))
    routed = gradients(stage, ROUTED, dtype)
    if moe is None:
        experts = Weights(routed)
    else:
        rank, size = moe["ep"].get_local_rank(), moe["ep"].size()
        experts = Weights({name: g.chunk(size)[rank].clone() for name, g in routed.items()})
        if kind == "plain":
            mark_shards(experts, moe["ep"])
        else:
            for name, p in list(experts.named_parameters()):
                spread = DTensor.from_local(p.data, moe["ep"], [Shard(0)])
                experts.register_parameter(name, nn.Parameter(spread))
        fully_shard(experts, mesh=moe["ep_shard"])
    fully_shard(dense, mesh=world["dp_shard_cp"])
    part = nn.ModuleDict({"dense": dense, "experts": experts})
    (dense() + experts()).backward()
    return part


def whole_gradients(part: nn.Module, kind: str, moe: DeviceMesh | None) -> Iterator[Any]:
    for name, p in part.named_parameters():
        gradient = p.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if kind == "plain" and moe is not None and name.startswith("experts"):
            mine = gradient.contiguous()
            shards = [torch.empty_like(mine) for _ in range(moe["ep"].size())]
            torch.distributed.all_gather(shards, mine, group=moe["ep"].get_group())
            gradient = torch.cat(shards)
        yield name.rpartition(".")[2], gradient


Sizes = dict[str, int]
Clipped = tuple[float, float, dict[str, torch.Tensor]]


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """New processes for each test: torch keeps meshes in caches, after their groups have gone."""
    pool = RankPool()
    yield pool
    pool.close()


def clip_all_ways(sizes: Sizes, kind: str) -> dict[tuple[float, bool | None], Clipped]:
    """Per type of norm: measured, measured again while clipping, and the clipped gradients."""
    meshes = build_mesh(ParallelSizes(**sizes))
    mesh = meshes.world_mesh
    found = {}
    for norm_type, foreach in itertools.product(NORM_TYPES, (None, False)):
        part = make_part(kind, meshes, torch.float64)
        measured = clip_grad_norm(None, [part], norm_type, device_mesh=mesh)
        norm = clip_grad_norm(MAX_NORM, [part], norm_type, device_mesh=mesh, foreach=foreach)
        stage = mesh["pp"].get_local_rank()
        after = whole_gradients(part, kind, meshes.moe_mesh)
        named = {f"{stage}.{name}": gradient for name, gradient in after}
        found[norm_type, foreach] = measured.item(), norm.item(), named
    return found


LAYOUTS: dict[str, tuple[int, Sizes]] = {
    "2 stages": (2, {"pp_size": 2}),
    "2 experts": (2, {"ep_size": 2}),
    "2 shards": (2, {"dp_size": 2}),
    "2 stages x 2 shards": (4, {"pp_size": 2, "dp_size": 2}),
    "2 stages x 2 experts": (4, {"pp_size": 2, "ep_size": 2}),
    "2 expert shards x 2 experts": (4, {"ep_size": 2}),
    "4 experts": (4, {"ep_size": 4}),
    "2 replicas x 2 shards and 2 experts": (4, {"dp_replicate_size": 2, "ep_size": 2}),
}


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_one_process(ranks: RankPool, layout: str, kind: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    runs = ranks.run(world_size, clip_all_ways, sizes, kind)
    for (norm_type, foreach), (_, norm, _) in runs[0].items():
        wanted, after = clipped(everything(sizes.get("pp_size", 1)), norm_type)
        assert norm == pytest.approx(wanted, rel=1e-12)
        each = [run[norm_type, foreach] for run in runs]
        assert {found for measured, norm, _ in each for found in (measured, norm)} == {norm}
        got = {name: gradient for *_, named in each for name, gradient in named.items()}
        assert got.keys() == after.keys()
        for name, gradient in after.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=0)


# --- what else gradients can be


def norms_of(parts: list[nn.Module], mesh: DeviceMesh, **options: Any) -> list[float]:
    return [clip_grad_norm(None, parts, t, device_mesh=mesh, **options).item() for t in NORM_TYPES]


def wanted_norms(*gradients: torch.Tensor) -> list[Any]:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    return [pytest.approx(flat.norm(norm_type).item(), rel=1e-12) for norm_type in NORM_TYPES]


def some_without_gradients(kind: str) -> list[float]:
    """A stage that trains nothing; or experts of one rank that no token came to."""
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2))
    part = make_part(kind, meshes, torch.float64)
    stage = meshes.world_mesh["pp"].get_local_rank()
    assert meshes.moe_mesh is not None
    for p in part.parameters() if stage == 0 else []:
        p.grad = None
    for p in part["experts"].parameters() if meshes.moe_mesh["ep"].get_local_rank() == 0 else []:
        if kind == "plain":  # the shards of a DTensor have a gradient all or none of them
            p.grad = None
    before = [p.grad is None for p in part.parameters()]
    found = norms_of([part], meshes.world_mesh)
    clip_grad_norm(MAX_NORM, [part], device_mesh=meshes.world_mesh)
    assert [p.grad is None for p in part.parameters()] == before
    return found


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_ranks_without_gradients(ranks: RankPool, kind: str) -> None:
    whole = {n: g for n, g in everything(2).items() if n.startswith("1.")}
    if kind == "plain":
        whole |= {f"1.{name}": whole[f"1.{name}"][EXPERTS // 2 :] for name in ROUTED}
    for found in ranks.run(4, some_without_gradients, kind):
        assert found == wanted_norms(*whole.values())


def over_tensor_parallel_ranks() -> tuple[list[float], torch.Tensor]:
    """Shards over FSDP and tensor-parallel ranks, a replica, and sums that are not made yet."""
    mesh = build_mesh(ParallelSizes(dp_size=2, tp_size=2)).world_mesh
    both = mesh["dp_shard", "tp"]
    torch.manual_seed(1)
    part = nn.Module()
    for name, placements in {
        "sharded": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
        "over_tp": [Replicate(), Shard(0)],
        "replica": [Replicate(), Replicate()],
        "plain": None,
    }.items():
        gradient = torch.randn(6, 4, dtype=torch.float64)
        p = torch.zeros_like(gradient)
        if placements is not None:
            p = distribute_tensor(p, both, placements)
            gradient = distribute_tensor(gradient, both, placements)
        part.register_parameter(name, nn.Parameter(p))
        part.get_parameter(name).grad = gradient
    # Each rank has its summand, as of a replicated weight that met sharded activations.
    summand = torch.full((6, 4), 1.0 + both.get_local_rank("tp"), dtype=torch.float64)
    part.register_parameter(
        "partial",
        nn.Parameter(distribute_tensor(torch.zeros_like(summand), both, [Shard(0), Replicate()])),
    )
    part.partial.grad = DTensor.from_local(
        summand.chunk(2)[both.get_local_rank("dp_shard")], both, [Shard(0), Partial()]
    )
    return norms_of([part], mesh), part.partial.grad.full_tensor()


def test_tensor_parallel_gradients(ranks: RankPool) -> None:
    torch.manual_seed(1)
    gradients = [torch.randn(6, 4, dtype=torch.float64) for _ in range(5)]
    whole = torch.full((6, 4), 1.0 + 2.0, dtype=torch.float64)
    for found, partial in ranks.run(4, over_tensor_parallel_ranks):
        assert found == wanted_norms(*gradients, whole)
        assert torch.equal(partial, whole)


def with_a_tie() -> tuple[list[float], float]:
    """The first and the last stage have one weight, which a third has twice."""
    mesh = build_mesh(ParallelSizes(pp_size=2, dp_size=2)).world_mesh
    stage = mesh["pp"].get_local_rank()
    parts = [Weights({"tied": torch.arange(6.0).double()}) for _ in range(2)]
    for part in parts:
        fully_shard(part, mesh=mesh["dp_shard_cp"])
        part().backward()
    if stage == 1:
        parts[1].tied = parts[0].tied
        parts[0].tied.pp_replica = True
    else:
        del parts[1]
    found = norms_of(parts, mesh)
    clip_grad_norm(MAX_NORM, parts, device_mesh=mesh)
    return found, parts[0].tied.grad.full_tensor().norm().item()


def test_a_tied_weight_counts_once_and_is_clipped_once(ranks: RankPool) -> None:
    for found, after in ranks.run(4, with_a_tie):
        assert found == wanted_norms(torch.arange(6.0))
        assert after == pytest.approx(MAX_NORM, rel=1e-5)


def in_half_precision() -> tuple[list[float], set[torch.dtype]]:
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2))
    part = make_part("dtensor", meshes, torch.bfloat16)
    found = norms_of([part], meshes.world_mesh)
    clip_grad_norm(MAX_NORM, [part], device_mesh=meshes.world_mesh)
    return found, {p.grad.dtype for p in part.parameters() if p.grad is not None}


def test_gradients_in_half_precision(ranks: RankPool) -> None:
    whole = everything(2, torch.bfloat16).values()
    wanted = [pytest.approx(each.expected, rel=1e-6) for each in wanted_norms(*whole)]
    for found, dtypes in ranks.run(4, in_half_precision):
        assert found == wanted  # a norm in bfloat16 is off by 4e-3
        assert dtypes == {torch.bfloat16}


def not_finite(bad: float, where: int) -> tuple[list[float], list[str]]:
    """One number of one shard of one stage is not finite."""
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2))
    part = make_part("dtensor", meshes, torch.float64)
    if torch.distributed.get_rank() == where:
        local(part["experts"].up.grad)[0, 0, 0] = bad
    messages = []
    for norm_type in NORM_TYPES:
        with pytest.raises(RuntimeError, match="must not be taken") as caught:
            clip_grad_norm(
                1.0, [part], norm_type, device_mesh=meshes.world_mesh, error_if_nonfinite=True
            )
        messages.append(str(caught.value))
    return norms_of([part], meshes.world_mesh), messages


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_rank_learns_that_a_norm_is_not_finite(ranks: RankPool, bad: float) -> None:
    for where in (0, 3):
        for found, messages in ranks.run(4, not_finite, bad, where):
            assert [str(norm) for norm in found] == [str(abs(bad))] * len(NORM_TYPES)
            assert len(messages) == len(NORM_TYPES)


def scale(divisor: Any) -> dict[str, torch.Tensor]:
    meshes = build_mesh(ParallelSizes(pp_size=2, ep_size=2))
    part = make_part("plain", meshes, torch.float64)
    stage = meshes.world_mesh["pp"].get_local_rank()
    group = meshes.world_mesh["pp"].get_group()
    stages = [PipelineStage(part, stage, 2, torch.device("cpu"), group=group)]
    scale_grads_by_divisor(stages, divisor)
    scale_grads_by_divisor(stages, 1)
    found = whole_gradients(part, "plain", meshes.moe_mesh)
    return {f"{stage}.{name}": gradient for name, gradient in found}


@pytest.mark.parametrize("divisor", [3, 0.7, torch.tensor(24)])
def test_gradients_of_every_kind_are_divided(ranks: RankPool, divisor: Any) -> None:
    runs = ranks.run(4, scale, divisor)
    got = {name: gradient for run in runs for name, gradient in run.items()}
    for name, gradient in everything(2).items():
        assert torch.equal(got[name], gradient / float(divisor)), name


def without_a_mesh(pp_enabled: bool) -> float:
    meshes = build_mesh(ParallelSizes(dp_size=2))
    part = make_part("dtensor", meshes, torch.float64)
    return clip_grad_norm(MAX_NORM, [part], pp_enabled=pp_enabled).item()


def test_shards_over_the_default_group_are_no_pipeline(ranks: RankPool) -> None:
    norm, _ = clipped(everything(1), 2.0)
    assert ranks.run(2, without_a_mesh, False) == [pytest.approx(norm, rel=1e-12)] * 2
    for kind, message in ranks.run_expecting_error(2, without_a_mesh, True, timeout=30):
        assert kind == "ValueError"
        assert "sharded over 2 of them (axis 'dp_shard_cp')" in message
        assert "as device_mesh, or pp_enabled=False" in message
