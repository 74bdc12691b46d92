"""Data parallelism of a whole model, without a pipeline: torch's DDP, or the package megatron-fsdp."""

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pp_autopipeline.checks import refuse, warn_once
from pp_autopipeline.parallelize.config import DDPConfig, MegatronFSDPConfig

logger = logging.getLogger(__name__)


def replicate(part: nn.Module, mesh: DeviceMesh, config: DDPConfig) -> DistributedDataParallel:
    """Return a module whose gradients are averaged over a data-parallel axis.

    Every rank of the axis calls it; the weights of its first rank are sent to all.

    Raises:
        ValueError: If the module has no trainable parameter, or some have no values yet.
    """
    problems = []
    empty = [name for name, p in part.named_parameters() if p.device.type == "meta"]
    if empty:
        problems.append(
            f"{len(empty)} parameters are on the meta device ({empty[0]}, ...), and DDP sends "
            "values at once: build from a model that has them, or use FSDP2Config"
        )
    if not any(parameter.requires_grad for parameter in part.parameters()):
        problems.append("no parameter is trainable")
    refuse("DDP is impossible", problems)
    device = next(part.parameters()).device
    return DistributedDataParallel(
        part,
        device_ids=None if device.type == "cpu" else [device],
        process_group=mesh.get_group(),
        broadcast_buffers=config.broadcast_buffers,
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
    )


def megatron_fsdp_problems(device_type: str) -> list[str]:
    """Return what keeps the package megatron-fsdp from running here."""
    problems = []
    if find_spec("megatron_fsdp") is None:
        problems.append("megatron_fsdp is not installed: pip install megatron-fsdp")
    if device_type != "cuda" or not torch.cuda.is_available():
        problems.append(
            f"it is for CUDA devices, and the mesh is of {device_type!r}: use FSDP2Config"
        )
    return problems


def shard_with_megatron(
    part: nn.Module, mesh: DeviceMesh, axis_names: tuple[str, ...], config: MegatronFSDPConfig
) -> nn.Module:
    """Return a module that megatron-fsdp shards over the data-parallel axes of a mesh.

    Its optimizer must be made by `megatron_fsdp.fully_shard_optimizer`.

    Raises:
        ValueError: If the package or a GPU is missing.
    """
    refuse("Megatron-FSDP is impossible", megatron_fsdp_problems(mesh.device_type))
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    if config.check_for_nan_in_grad:
        warn_once(
            logger,
            "check_for_nan_in_grad has no effect since megatron-fsdp 0.5: use "
            "report_nan_in_param_grad, or set it False",
        )
    outer = {"dp_outer_dim": axis_names[0]} if len(axis_names) > 1 else {}
    policy: Any = MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if config.preserve_fp32_weights else None,
        grad_comm_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
    )
    wrapped: nn.Module = fully_shard_model(
        module=part,
        device_mesh=mesh,
        dp_shard_dim=axis_names[-1],
        **outer,
        fsdp_unit_modules=config.megatron_fsdp_unit_modules or _unit_classes(part),
        zero_dp_strategy=config.zero_dp_strategy,
        init_model_with_meta_device=config.init_fsdp_with_meta_device,
        mixed_precision_policy=policy,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        report_nan_in_param_grad=config.report_nan_in_param_grad,
        average_in_collective=config.average_in_collective,
        disable_bucketing=config.disable_bucketing,
        calculate_per_token_loss=config.calculate_per_token_loss,
        keep_fp8_transpose_cache=config.keep_fp8_transpose_cache,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer,
    )
    return wrapped


def _unit_classes(part: nn.Module) -> list[type[nn.Module]]:
    names = set(getattr(part, "_no_split_modules", None) or ())
    return list({type(module) for module in part.modules() if type(module).__name__ in names})
