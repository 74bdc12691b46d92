"""What is taken from torch under private names is where it was, on the torch that is installed."""

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pp_bufferpool import install_recv_buffer_pool, torch_private
from pp_bufferpool.stage_methods import StageMethods
from pp_schedule import build_pipeline_schedule

OURS = (
    "_set_up_forward", "_set_up_backward", "_post_forward", "_post_backward", "_take_forward",
    "_take_backward", "_take_local_gradients", "_run_forward", "_run_backward",
    "_run_weight_backward",
)  # fmt: skip


@pytest.fixture
def stage() -> Iterator[PipelineStage]:
    dist.init_process_group("fake", rank=1, world_size=2)
    yield PipelineStage(nn.Linear(2, 2), 1, 2, torch.device("cpu"))
    dist.destroy_process_group()


def test_every_name_is_there(stage: PipelineStage) -> None:
    for name in ("1f1b", "gpipe"):
        schedule = build_pipeline_schedule(None, name, 1, 4, [stage], nn.functional.mse_loss)
        assert torch_private.missing_names(stage, schedule) == []


def test_torch_calls_the_methods_as_before() -> None:
    wanted = {
        "_setup_forward_recv_info": ["self", "num_microbatches", "has_backward"],
        "_setup_backward_recv_info": ["self", "num_microbatches"],
        "get_fwd_recv_ops": ["self", "fwd_chunk_id"],
        "get_bwd_recv_ops": ["self", "bwd_chunk_id"],
        "_retrieve_recv_activations": ["self", "fwd_chunk_id"],
        "_retrieve_recv_grads": ["self", "bwd_chunk_id"],
        "set_local_bwd_input": ["self", "next_stage_bwd_outputs", "mb_index"],
        "backward_one_chunk": ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"],
        "backward_weight_one_chunk": ["self", "bwd_chunk_id", "last_backward"],
    }
    for name, parameters in wanted.items():
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters) == parameters, name
        ours = getattr(StageMethods, OURS[torch_private.STAGE_METHODS.index(name)])
        assert list(inspect.signature(ours).parameters) == parameters, name
    assert {*wanted, "forward_one_chunk"} == set(torch_private.STAGE_METHODS)


@pytest.mark.parametrize("name", ["args_recv_info", "grad_recv_info"])
def test_a_name_that_is_not_there_is_named(stage: PipelineStage, name: str) -> None:
    loss_fn = nn.functional.mse_loss
    schedule = build_pipeline_schedule(None, "1f1b", 1, 4, [stage], loss_fn)
    delattr(stage, name)
    with pytest.raises(RuntimeError, match=rf"has no PipelineStage\.{name}.*2\.13 to 2\.15"):
        install_recv_buffer_pool([stage], schedule)


def test_references_to_a_storage_are_counted() -> None:
    storage = torch_private.new_storage(8, torch.device("cpu"))
    assert torch_private.use_count(storage) == 1
    tensor = torch.empty(0).set_(storage)
    assert torch_private.use_count(storage) == 2
    del tensor
    assert torch_private.use_count(storage) == 1
