"""What only a GPU can show. Several stages in one process on one GPU; NCCL where there are two.

python -m pytest -q -m gpu tests_integration/gpu
"""

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from pp_autopipeline import AutoPipeline
from pp_autopipeline.parallelize import FSDP2Config, parallelize_fn
from pp_bufferpool.slots import Layout, Meter, Slot
from pp_schedule import record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS, LENGTH = 8, 64


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def llama(dtype: torch.dtype, num_layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        yield init_device_mesh("cuda", (1,), mesh_dim_names=("pp",))
        dist.destroy_process_group()


def build(mesh: DeviceMesh, model: nn.Module, **others: Any) -> AutoPipeline:
    """Four stages in this one process."""
    parallelize = others.pop("parallelize_fn", None)
    return AutoPipeline(
        mesh, pp_schedule="interleaved_1f1b", layers_per_stage=1, pp_microbatch_size=2,
        pp_batch_size=ROWS, **others,
    ).build(model, loss_fn=token_mean, parallelize_fn=parallelize)  # fmt: skip


def gradients(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    named = [pair for part in parts for pair in part.named_parameters()]
    return {name: p.grad.float() for name, p in named if p.grad is not None}


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= rtol * gradient.norm(), name


def unsplit(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    batch = ids().cuda()
    loss = token_mean(model(batch, use_cache=False).logits, batch)
    loss.backward()
    return loss.item(), gradients([model])


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_stages_on_one_gpu(
    mesh: DeviceMesh, dtype: torch.dtype, rtol: float, backend: SDPBackend
) -> None:
    if backend == SDPBackend.FLASH_ATTENTION and dtype == torch.float32:
        pytest.skip("flash attention knows no float32")
    with sdpa_kernel(backend):
        loss, wanted = unsplit(llama(dtype))
        ap = build(mesh, llama(dtype))
        found = ap.step(ids(), target=ids()).loss
    assert found is not None
    assert found.item() == pytest.approx(loss, rel=rtol)
    same(gradients(ap.parts), wanted, rtol)


def test_compiled_stages(mesh: DeviceMesh) -> None:
    _, wanted = unsplit(llama(torch.float32))
    compiled = parallelize_fn(FSDP2Config(enable_compile=True))
    ap = build(mesh, llama(torch.float32), parallelize_fn=compiled)
    ap.step(ids(), target=ids())
    same(gradients(ap.parts), wanted, 1e-3)


def test_recorded_actions_have_the_length_of_their_kernels(mesh: DeviceMesh) -> None:
    ap = build(mesh, llama(torch.bfloat16))
    ap.step(ids(), target=ids())
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with record(ap.info.schedule) as recording:
        begin.record()
        ap.step(ids(), target=ids())
        end.record()
    torch.cuda.synchronize()
    timeline = recording.timeline()
    assert len(timeline.spans) == 2 * 4 * ROWS // 2
    assert 0 < timeline.makespan <= begin.elapsed_time(end) / 1e3 * 1.05


def test_slots_leave_the_allocator_alone() -> None:
    layout = Layout([torch.empty((2, 1024, 256), dtype=torch.bfloat16, device="meta")])
    slot = Slot(torch.device("cuda"), Meter())
    slot.lend(layout)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    addresses = set()
    for value in range(50):
        (tensor,) = slot.lend(layout)
        assert tensor is not None
        tensor.fill_(value)
        addresses.add(tensor.data_ptr())
        assert float(tensor.float().mean()) == value
        del tensor
    assert len(addresses) == 1
    # What the test itself allocates, means and casts, is two per loan.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 2 * 50
    slot.poison()
    (tensor,) = slot.lend(layout)
    assert tensor is not None
    assert bool(tensor.isnan().all())


def _on_two_gpus(rank: int, store: str, found: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("pp",))
    for schedule, counts in (("1f1b", 2), ("interleaved_1f1b", 1), ("v_schedule", 1)):
        for pool in (False, True):
            ap = AutoPipeline(
                mesh, pp_schedule=schedule, layers_per_stage=counts, pp_microbatch_size=2,
                pp_batch_size=ROWS, pp_recv_buffer_pool=pool, device=torch.device("cuda", rank),
            ).build(llama(torch.float32), loss_fn=token_mean)  # fmt: skip
            loss = ap.step(ids(), target=ids()).loss
            assert loss is not None
            cpu = {name: g.cpu() for name, g in gradients(ap.parts).items()}
            found.put((schedule, pool, loss.item(), cpu))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_gpus_over_nccl() -> None:
    loss, wanted = unsplit(llama(torch.float32))
    context = torch.multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.NamedTemporaryFile() as file:
        processes = torch.multiprocessing.start_processes(
            _on_two_gpus, (file.name, found), 2, join=False, start_method="spawn"
        )
        runs = [found.get(timeout=240) for _ in range(12)]
        while not processes.join():
            pass
    for kind in {(run[0], run[1]) for run in runs}:
        parts = [run for run in runs if (run[0], run[1]) == kind]
        assert all(run[2] == pytest.approx(loss, rel=1e-4) for run in parts)
        merged = {name: g.cuda() for run in parts for name, g in run[3].items()}
        same(merged, wanted, 1e-3)
