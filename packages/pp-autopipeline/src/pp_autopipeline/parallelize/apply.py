"""Everything that is done to a stage besides being one, in the order in which it must be done."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pp_autopipeline import torch_private, transformers_private
from pp_autopipeline.checks import refuse, warn_once
from pp_autopipeline.parallelize.axes import axis_of, data_mesh, lonely_mesh
from pp_autopipeline.parallelize.checkpointing import checkpoint_layers
from pp_autopipeline.parallelize.config import (
    ActivationCheckpointing,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    StrategyConfig,
)
from pp_autopipeline.parallelize.context_parallel import apply_cp
from pp_autopipeline.parallelize.fsdp2 import shard_experts, shard_stage
from pp_autopipeline.parallelize.replicas import replicate, shard_with_megatron
from pp_autopipeline.parallelize.sequence_parallel import apply_sp
from pp_autopipeline.parallelize.tensor_parallel import apply_ep, apply_tp, device_of
from pp_split_hf import stage_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parallelize:
    """A `ParallelizeFnProtocol` made of configs; every rank of the job calls it alike.

    Experts, tensor and sequence parallelism; activation checkpointing; autocast; compiling; then
    data parallelism around it all.
    """

    strategy: StrategyConfig
    """How to shard or replicate."""
    moe: MoEParallelizerConfig = field(default_factory=MoEParallelizerConfig)
    """What is different for experts."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """None: that of the strategy."""
    reapply_trainability: Callable[[nn.Module], None] | None = None
    """Called before data parallelism."""
    cp_ring_degree: int = 1
    """Ring-attention factor of the context-parallel axis."""

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None,
        *,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
    ) -> nn.Module:
        """Do all of it, in place; return the module, wrapped by DDP or Megatron-FSDP if asked."""
        # 1. Matrices and experts over ranks.
        tp = axis_of(world_mesh, tp_axis_name)
        ep = axis_of(moe_mesh, ep_axis_name)
        experts = self._experts(model, ep, tp, world_mesh)
        if tp is not None:
            self._share_matrices(model, tp, without_experts=ep is not None)
        elif isinstance(self.strategy, FSDP2Config):
            self._tell_of_settings_for_tensor_parallelism()
        cp = axis_of(world_mesh, cp_axis_name)
        if cp is not None:
            self._share_sequence(model, cp, tp, experts)
        # 2. What a layer keeps, and how it computes.
        self._checkpoint(model)
        self._autocast(model)
        if isinstance(self.strategy, FSDP2Config):
            self._speed_up(model, tp)
        if self.reapply_trainability is not None:
            self.reapply_trainability(model)
        # 3. Data parallelism around it.
        mesh = data_mesh(world_mesh, dp_axis_names, cp_axis_name)
        if isinstance(self.strategy, DDPConfig):
            return model if mesh is None else replicate(model, mesh, self.strategy)
        if isinstance(self.strategy, MegatronFSDPConfig):
            return shard_with_megatron(model, world_mesh, dp_axis_names, self.strategy)
        if mesh is None:
            return model
        if experts:
            assert moe_mesh is not None
            copies = moe_mesh[tuple(ep_shard_axis_names or ("ep_shard",))]
            # Context-parallel ranks have other tokens of the same batches.
            batches = mesh.size() // (1 if cp is None else cp.size())
            shard_experts(experts, copies, batches, self.strategy, self.moe)
        in_pipeline = "pp" in (world_mesh.mesh_dim_names or ()) and world_mesh["pp"].size() > 1
        shard_stage(model, mesh, self.strategy, in_pipeline)
        return model

    def compute_dtype(
        self,
        world_mesh: DeviceMesh,
        *,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None = None,
        **others: Any,
    ) -> torch.dtype | None:
        """Return what stages compute in, and so send, if that is not their parameters' dtype."""
        if not isinstance(self.strategy, FSDP2Config) or self.strategy.mp_policy is None:
            return None
        is_sharded = data_mesh(world_mesh, dp_axis_names, cp_axis_name) is not None
        return self.strategy.mp_policy.param_dtype if is_sharded else None

    def _experts(
        self, part: nn.Module, ep: DeviceMesh | None, tp: DeviceMesh | None, world: DeviceMesh
    ) -> list[nn.Module]:
        if ep is None:
            return []
        same_tokens = lonely_mesh(world)
        if tp is not None and set(tp.mesh.flatten().tolist()) <= set(ep.mesh.flatten().tolist()):
            same_tokens = tp
        return apply_ep(part, ep, same_tokens)

    def _share_matrices(self, part: nn.Module, tp: DeviceMesh, without_experts: bool) -> None:
        config = self.strategy
        assert isinstance(config, FSDP2Config)
        regions = apply_tp(part, tp, config.tp_plan, without_experts)
        sequence_parallel = config.sequence_parallel
        if config.enable_async_tensor_parallel and not sequence_parallel:
            warn_once(logger, "enable_async_tensor_parallel=True sets sequence_parallel=True too")
            sequence_parallel = True
        if sequence_parallel:
            apply_sp(part, tp, regions)

    def _share_sequence(
        self, part: nn.Module, cp: DeviceMesh, tp: DeviceMesh | None, experts: list[nn.Module]
    ) -> None:
        config = self.strategy
        problems = []
        if not isinstance(config, FSDP2Config):
            problems.append(
                f"{type(config).__name__} does not go with context parallelism: use FSDP2Config"
            )
        elif tp is not None and (config.sequence_parallel or config.enable_async_tensor_parallel):
            problems.append(
                "sequence_parallel=True and a context-parallel axis both share the sequence: use "
                "one of them"
            )
        if self.cp_ring_degree > 1:
            problems.append(
                f"cp_ring_degree={self.cp_ring_degree}: torch's ring attention (2.13 to 2.15) knows "
                "CUDA's attention kernels alone and no masks; leave it 1, and the whole axis shares "
                "heads"
            )
        refuse("context parallelism is impossible", problems)
        apply_cp(part, cp, experts, 1 if tp is None else tp.size())

    def _tell_of_settings_for_tensor_parallelism(self) -> None:
        for name in ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel"):
            if getattr(self.strategy, name):
                warn_once(logger, f"{name} has no effect: there is no tensor-parallel axis")

    def _checkpoint(self, part: nn.Module) -> None:
        mode = self.activation_checkpointing
        if mode is None:
            mode = self.strategy.activation_checkpointing
        scope: Any = getattr(self.strategy, "activation_checkpointing_scope", "all")
        layers = checkpoint_layers(part, mode, scope, self.moe.ignore_router_for_ac)
        if mode and not layers and any(True for _ in part.parameters()):
            warn_once(
                logger,
                f"activation_checkpointing={mode!r} with activation_checkpointing_scope={scope!r} "
                "finds no layer in a stage",
            )

    def _autocast(self, part: nn.Module) -> None:
        dtype = getattr(self.strategy, "autocast_dtype", None)
        if dtype is None:
            return
        device_type = device_of(part).type
        entered: list[torch.autocast] = []

        # Hooks, for the forward itself is the boundary's.
        def enter(module: nn.Module, inputs: Any) -> None:
            context = torch.autocast("cpu" if device_type == "meta" else device_type, dtype=dtype)
            context.__enter__()
            entered.append(context)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            entered.pop().__exit__(None, None, None)

        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)

    def _speed_up(self, part: nn.Module, tp: DeviceMesh | None) -> None:
        config = self.strategy
        assert isinstance(config, FSDP2Config)
        if config.patch_is_packed_sequence:
            transformers_private.take_no_batch_for_packed()
        if config.enable_async_tensor_parallel and tp is not None:
            if tp.device_type == "cuda":
                torch_private.overlap_tensor_parallel(tp)
            else:
                warn_once(
                    logger,
                    "enable_async_tensor_parallel=True has no effect: it is for CUDA devices, and "
                    f"the mesh is of {tp.device_type!r}",
                )
        if config.enable_compile:
            stage = stage_part(part)
            assert stage is not None
            for name in stage.layout.layer_fqns:
                layer = part.get_submodule(name)
                if any(True for _ in layer.parameters()):
                    layer.compile()


def parallelize_fn(strategy: StrategyConfig, **settings: Any) -> Parallelize:
    """Return a callback for `AutoPipeline.build` from a config alone.

    Args:
        strategy: `FSDP2Config` or one of the others.
        **settings: Fields of `Parallelize`.
    """
    return replace(Parallelize(strategy), **settings)
