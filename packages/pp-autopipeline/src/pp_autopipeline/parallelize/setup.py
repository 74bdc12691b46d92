"""Meshes and policies of a job in one object, in the names of NeMo AutoModel."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pp_autopipeline.checks import refuse
from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.parallelize.combinations import combination_problems
from pp_autopipeline.parallelize.config import (
    STRATEGIES,
    ActivationCheckpointing,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    StrategyConfig,
)
from pp_autopipeline.parallelize.replicas import megatron_fsdp_problems
from pp_mesh import Meshes, ParallelSizes, build_mesh


@dataclass
class DistributedSetup:
    """What parallelism a job has.

    Example:
        >>> setup = DistributedSetup.build("fsdp2", ParallelSizes(pp_size=2, tp_size=2))
        >>> ap = AutoPipeline(**setup.pipeline_axes, pp_schedule="1f1b", pp_batch_size=8)
        >>> ap.build(model, loss_fn=loss_fn, parallelize_fn=setup.parallelize_fn)
    """

    device_mesh: DeviceMesh
    """The mesh of all axes but those of experts."""
    moe_mesh: DeviceMesh | None = None
    """The mesh of the experts, with the axes `ep_shard` and `ep`."""
    strategy_config: StrategyConfig | None = None
    """How stages are sharded or replicated; None: `FSDP2Config()`."""
    pipeline_config: PipelineConfig | None = None
    """Schedule, split and sizes of the pipeline."""
    moe_parallel_config: MoEParallelizerConfig | None = None
    """What is different for experts."""
    activation_checkpointing: ActivationCheckpointing = False
    """The mode in effect; False: that of the strategy."""
    process_group: dist.ProcessGroup | None = None
    """For collectives of a recipe that must not involve ranks outside the mesh."""
    reapply_trainability: Callable[[nn.Module], None] | None = None
    """Called on each stage's module after it was cut and before it is sharded, to freeze again
    what was to be frozen."""
    cp_ring_degree: int = 1
    """Ring-attention factor of the context-parallel axis."""
    cp_ulysses_degree: int | None = None
    """Ulysses factor of the context-parallel axis; None: the whole axis."""

    def __post_init__(self) -> None:
        self.strategy_config = self.strategy_config or FSDP2Config()
        strategy = self.strategy_config
        if not self.activation_checkpointing:
            self.activation_checkpointing = strategy.activation_checkpointing
        problems = combination_problems(
            strategy,
            self.activation_checkpointing,
            pp_size=self.pp_size,
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            ep_size=self.ep_size,
            dp_replicate_size=self.dp_replicate_size or 1,
        )
        if isinstance(strategy, MegatronFSDPConfig):
            problems += megatron_fsdp_problems(self.device_mesh.device_type)
        problems += self._context_problems()
        refuse("this setup is impossible", problems)

    @classmethod
    def build(
        cls,
        strategy: str | StrategyConfig = "fsdp2",
        parallelism_sizes: ParallelSizes | None = None,
        pipeline_config: PipelineConfig | dict[str, Any] | None = None,
        *,
        device_type: str | None = None,
        timeout_minutes: float | None = None,
        **others: Any,
    ) -> "DistributedSetup":
        """Make the meshes, and a setup of them. Every rank calls it alike.

        Args:
            strategy: "fsdp2", "ddp", "megatron_fsdp", or one of their configs.
            parallelism_sizes: Size of every axis; None: all ranks are data-parallel.
            pipeline_config: A `PipelineConfig`, or its fields.
            device_type: See `pp_mesh.build_mesh`.
            timeout_minutes: See `pp_mesh.build_mesh`.
            **others: Fields of the setup.

        Raises:
            ValueError: Listing everything that is wrong.
        """
        if isinstance(strategy, str):
            if strategy not in STRATEGIES:
                near = get_close_matches(strategy, STRATEGIES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"strategy={strategy!r} is none of {', '.join(map(repr, STRATEGIES))}{hint}"
                )
            strategy = STRATEGIES[strategy]()
        if isinstance(pipeline_config, dict):
            pipeline_config = PipelineConfig(**pipeline_config)
        world_mesh, moe_mesh = build_mesh(
            parallelism_sizes or ParallelSizes(), device_type, timeout_minutes
        )
        return cls(world_mesh, moe_mesh, strategy, pipeline_config, **others)

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel degree; 1 by default."""
        return self._meshes.pp_size

    @property
    def pp_enabled(self) -> bool:
        """Whether there is more than one pipeline rank."""
        return self._meshes.pp_enabled

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree; 1 by default."""
        return self._meshes.tp_size

    @property
    def cp_size(self) -> int:
        """Context-parallel degree; 1 by default."""
        return self._meshes.cp_size

    @property
    def dp_size(self) -> int | None:
        """Data-parallel degree, copies times shards; None by default."""
        return self._meshes.dp_size

    @property
    def dp_replicate_size(self) -> int | None:
        """HSDP replication degree; None by default."""
        return self._meshes.dp_replicate_size

    @property
    def dp_shard_size(self) -> int:
        """Ranks that shard one copy of the model; 1 by default."""
        return self._meshes.dp_shard_size

    @property
    def ep_size(self) -> int:
        """Expert-parallel degree; 1 by default."""
        return self._meshes.ep_size

    @property
    def _meshes(self) -> Meshes:
        return Meshes(self.device_mesh, self.moe_mesh)

    @property
    def pipeline_axes(self) -> dict[str, Any]:
        """Meshes and axis names, as `AutoPipeline` takes them."""
        names = self.device_mesh.mesh_dim_names or ()
        data: tuple[str, ...] = ("dp",)
        if "dp_shard" in names:
            data = (
                ("dp_replicate", "dp_shard") if (self.dp_replicate_size or 1) > 1 else ("dp_shard",)
            )
        return {
            "world_mesh": self.device_mesh,
            "moe_mesh": self.moe_mesh,
            "dp_axis_names": data,
            "cp_axis_name": "cp" if self.cp_size > 1 else None,
            "tp_axis_name": "tp" if self.tp_size > 1 else None,
            "ep_axis_name": "ep" if self.ep_size > 1 else None,
            "ep_shard_axis_names": ("ep_shard",) if self.ep_size > 1 else None,
        }

    @property
    def parallelize_fn(self) -> Callable[..., Any]:
        """What `AutoPipeline.build` calls on each stage: all of this setup but the pipeline."""
        from pp_autopipeline.parallelize.apply import Parallelize

        assert self.strategy_config is not None
        return Parallelize(
            self.strategy_config,
            self.moe_parallel_config or MoEParallelizerConfig(),
            self.activation_checkpointing,
            self.reapply_trainability,
            self.cp_ring_degree,
        )

    def _context_problems(self) -> list[str]:
        ring, ulysses, cp_size = self.cp_ring_degree, self.cp_ulysses_degree, self.cp_size
        given = f"cp_ring_degree={ring}, cp_ulysses_degree={ulysses}"
        if ring < 1 or (ulysses is not None and ulysses < 1):
            return [f"{given}: both must be at least 1"]
        if cp_size % ring or (ulysses is not None and ring * ulysses != cp_size):
            return [f"{given} do not make cp_size={cp_size}: choose factors of it"]
        return []
