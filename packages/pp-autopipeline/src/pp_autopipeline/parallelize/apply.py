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
from pp_autopipeline.parallelize.combinations import combination_problems
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
from pp_autopipeline.parallelize.tensor_parallel import apply_ep, apply_tp
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
        self._check(world_mesh, tp, ep, dp_axis_names, cp_axis_name)
        experts = self._experts(model, ep, tp, world_mesh)
        if tp is not None:
            self._share_matrices(model, tp, without_experts=ep is not None)
        self._tell_of_settings_without_effect(tp, ep)
        cp = axis_of(world_mesh, cp_axis_name)
        if cp is not None:
            self._share_sequence(model, cp, tp, experts)
        # 2. What a layer keeps, and how it computes.
        if self.reapply_trainability is not None:
            self.reapply_trainability(model)
        self._checkpoint(model)
        self._autocast(model, world_mesh.device_type)
        if isinstance(self.strategy, FSDP2Config):
            self._speed_up(model, tp)
        # 3. Data parallelism around it.
        mesh = data_mesh(world_mesh, dp_axis_names, cp_axis_name)
        if isinstance(self.strategy, DDPConfig):
            return model if mesh is None else replicate(model, mesh, self.strategy)
        if isinstance(self.strategy, MegatronFSDPConfig):
            return shard_with_megatron(model, world_mesh, dp_axis_names, self.strategy)
        if mesh is None:
            warn_once(
                logger,
                "FSDP2Config shards nothing and changes no dtype: the mesh has no more than one "
                f"data-parallel rank on the axes {dp_axis_names}",
            )
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
        if data_mesh(world_mesh, dp_axis_names, cp_axis_name) is None:
            return None
        return self.strategy.mp_policy.output_dtype or self.strategy.mp_policy.param_dtype

    def _experts(
        self, part: nn.Module, ep: DeviceMesh | None, tp: DeviceMesh | None, world: DeviceMesh
    ) -> list[nn.Module]:
        if ep is None:
            return []
        if tp is None:
            return apply_ep(part, ep, lonely_mesh(world))
        sharing, holding = (set(axis.mesh.flatten().tolist()) for axis in (tp, ep))
        if sharing <= holding:
            return apply_ep(part, ep, tp)
        if len(sharing & holding) == 1:
            return apply_ep(part, ep, lonely_mesh(world))
        raise ValueError(
            f"ep_size={ep.size()} covers {len(sharing & holding)} of the tp_size={tp.size()} "
            "tensor-parallel ranks, which have the same tokens: choose an ep_size that divides the "
            f"data-parallel ranks, or a multiple of {tp.size()}"
        )

    def _check(
        self,
        world: DeviceMesh,
        tp: DeviceMesh | None,
        ep: DeviceMesh | None,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None,
    ) -> None:
        cp = axis_of(world, cp_axis_name)
        names = world.mesh_dim_names or ()
        copies = world[dp_axis_names[0]].size() if len(dp_axis_names) > 1 else 1
        problems = combination_problems(
            self.strategy,
            self.activation_checkpointing,
            pp_size=world["pp"].size() if "pp" in names else 1,
            tp_size=1 if tp is None else tp.size(),
            cp_size=1 if cp is None else cp.size(),
            ep_size=1 if ep is None else ep.size(),
            dp_replicate_size=copies,
        )
        refuse("this parallelism is impossible", problems)

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
        assert isinstance(config, FSDP2Config)
        problems = []
        if tp is not None and (config.sequence_parallel or config.enable_async_tensor_parallel):
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

    def _tell_of_settings_without_effect(
        self, tp: DeviceMesh | None, ep: DeviceMesh | None
    ) -> None:
        config = self.strategy
        idle: list[tuple[str, str]] = []
        if isinstance(config, FSDP2Config):
            if tp is None:
                names = ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel")
                no_axis = "there is no tensor-parallel axis"
                idle += [(name, no_axis) for name in names if getattr(config, name)]
            if not config.enable_fsdp2_prefetch:
                default = FSDP2Config()
                idle += [
                    (name, "enable_fsdp2_prefetch is False")
                    for name in ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth")
                    if getattr(config, name) != getattr(default, name)
                ]
        if ep is None and self.moe != MoEParallelizerConfig():
            idle.append(("moe_parallel_config", "there is no expert-parallel axis"))
        for name, reason in idle:
            warn_once(logger, f"{name} has no effect: {reason}")

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

    def _autocast(self, part: nn.Module, device_type: str) -> None:
        dtype = getattr(self.strategy, "autocast_dtype", None)
        if dtype is None:
            return
        entered: list[torch.autocast] = []

        # Hooks, for the forward itself is the boundary's.
        def enter(module: nn.Module, inputs: Any) -> None:
            context = torch.autocast(device_type, dtype=dtype)
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
        if config.enable_async_tensor_parallel and not config.enable_compile:
            warn_once(
                logger,
                "enable_async_tensor_parallel=True has no effect without enable_compile=True: it "
                "is the compiler that overlaps",
            )
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
