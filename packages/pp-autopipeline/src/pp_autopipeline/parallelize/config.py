"""What is done to a stage besides being a stage, in the names of NeMo AutoModel."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from pp_autopipeline.checks import refuse

ActivationCheckpointing = bool | Literal["full", "selective"]
CheckpointingScope = Literal["all", "language", "vision", "multimodal"]
FrozenSharding = Literal["root", "per_layer", "replicate"]


@dataclass
class MultimodalVisionConfig:
    """What concerns vision modules alone."""

    frame_sharding: bool = False
    """Share the frames of a video over the context-parallel axis. Not offered here: refused."""

    def __post_init__(self) -> None:
        problems = []
        if self.frame_sharding:
            problems.append("frame_sharding is not offered here: leave it False")
        refuse("MultimodalVisionConfig makes no sense", problems)


@dataclass
class MultimodalDistributedConfig:
    """What concerns vision and audio modules and their projectors."""

    frozen_sharding: FrozenSharding = "root"
    """What becomes of modules of which every parameter is frozen: `root` leaves them to the stage's
    outermost FSDP unit, which every rank runs; `per_layer` shards them by layer, for which all
    ranks must run them alike at every microbatch; `replicate` keeps a whole copy on each rank."""
    vision: MultimodalVisionConfig = field(default_factory=MultimodalVisionConfig)
    """What concerns vision modules alone."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        _choice(problems, "frozen_sharding", self.frozen_sharding, get_args(FrozenSharding))
        refuse("MultimodalDistributedConfig makes no sense", problems)


def _mixed_precision() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


@dataclass
class FSDP2Config:
    """Sharded data parallelism by torch's `fully_shard`, with what else is done to a stage."""

    sequence_parallel: bool = False
    """Share the sequence over the tensor-parallel ranks where tensor parallelism does not share
    something else."""
    tp_plan: dict[str, Any] | None = None
    """Rules that come before the model's own tensor-parallel plan: module names, `*` for layer
    numbers, to a style's name (Transformers' or torch's `ParallelStyle` objects)."""
    patch_is_packed_sequence: bool = False
    """Have Transformers take no batch for a packed one, which saves a synchronisation per attention
    layer. For the whole process; wrong for packed sequences."""
    mp_policy: MixedPrecisionPolicy | None = field(default_factory=_mixed_precision)
    """Dtypes of weights, reductions and outputs; None is the default: weights in bfloat16 for
    computing, gradients reduced in float32. `MixedPrecisionPolicy()` changes no dtype."""
    offload_policy: CPUOffloadPolicy | None = None
    """Keep sharded weights, gradients and optimizer states in the host's memory."""
    autocast_dtype: torch.dtype | str | None = None
    """Run each stage's forward under `torch.autocast` of this dtype."""
    activation_checkpointing: ActivationCheckpointing = False
    """Compute layers again in their backward: True or "full" everything of them, "selective" what
    costs little."""
    activation_checkpointing_scope: CheckpointingScope | list[CheckpointingScope] = "all"
    """Whose layers: "all", "language", "vision", or "multimodal" (vision, audio, video)."""
    defer_fsdp_grad_sync: bool = True
    """Reduce gradients once per step; else after every microbatch, so that no rank holds the whole
    gradient of a stage between microbatches."""
    reshard_after_forward: bool | None = None
    """Give up gathered weights after the forward. None: no in a pipeline, where they would be
    gathered for every microbatch again; else yes, but for the last layer."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with computation, by torch's inductor; for GPUs, with
    `enable_compile` and `sequence_parallel`."""
    enable_compile: bool = False
    """Compile each decoder layer by itself."""
    enable_fsdp2_prefetch: bool = False
    """Say which layers' weights are gathered ahead, instead of leaving it to FSDP."""
    fsdp2_backward_prefetch_depth: int = 2
    """How many layers ahead in the backward."""
    fsdp2_forward_prefetch_depth: int = 1
    """How many layers ahead in the forward."""
    multimodal: MultimodalDistributedConfig = field(default_factory=MultimodalDistributedConfig)
    """What concerns vision and audio modules."""

    def __post_init__(self) -> None:
        problems = _common_problems(self)
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            depth = getattr(self, name)
            if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
                problems.append(f"{name}={depth!r} must be an integer of at least 1")
        plan: object = self.tp_plan
        if plan is not None and not isinstance(plan, dict):
            problems.append(f"tp_plan={plan!r} must be a dict of module names to styles, or None")
        refuse("FSDP2Config makes no sense", problems)
        self.mp_policy = self.mp_policy or _mixed_precision()
        self.autocast_dtype = _as_dtype(self.autocast_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; `FSDP2Config(**config.to_dict())` is the same config."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class DDPConfig:
    """Replicated data parallelism by torch's `DistributedDataParallel`; not with a pipeline."""

    activation_checkpointing: ActivationCheckpointing = False
    """See `FSDP2Config.activation_checkpointing`."""
    activation_checkpointing_scope: CheckpointingScope | list[CheckpointingScope] = "all"
    """See `FSDP2Config.activation_checkpointing_scope`."""
    broadcast_buffers: bool = False
    """Bring module buffers of rank 0 to all ranks before each forward."""
    find_unused_parameters: bool = False
    """For models of which some trainable parameters are not always used."""
    static_graph: bool = False
    """Promise that the same parameters are used every time."""
    bucket_cap_mb: float | None = None
    """Size of the buckets in which gradients are reduced, in MiB; None is torch's own."""
    gradient_as_bucket_view: bool = False
    """Have gradients lie in the buckets, without a copy of their own."""
    autocast_dtype: torch.dtype | str | None = None
    """Run the forward under `torch.autocast` of this dtype."""

    def __post_init__(self) -> None:
        problems = _common_problems(self)
        size = self.bucket_cap_mb
        if size is not None and not (isinstance(size, int | float) and size > 0):
            problems.append(f"bucket_cap_mb={size!r} must be more than 0, or None")
        refuse("DDPConfig makes no sense", problems)
        self.autocast_dtype = _as_dtype(self.autocast_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; `DDPConfig(**config.to_dict())` is the same config."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class MegatronFSDPConfig:
    """Sharded data parallelism by the package megatron-fsdp; for GPUs, and not with a pipeline."""

    megatron_fsdp_unit_modules: list[str] | None = None
    """Class paths of the modules that are units; None: the model's `_no_split_modules`."""
    zero_dp_strategy: int = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    init_fsdp_with_meta_device: bool = False
    """The model is on the meta device; each unit is initialised when it is sharded."""
    grad_reduce_in_fp32: bool = False
    """Reduce gradients in float32."""
    preserve_fp32_weights: bool = False
    """Keep weights in float32 for the optimizer."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward goes on."""
    overlap_param_gather: bool = True
    """Gather weights while others compute."""
    check_for_nan_in_grad: bool = True
    """Of no effect since megatron-fsdp 0.5: see `report_nan_in_param_grad`."""
    report_nan_in_param_grad: bool = False
    """Look for NaN in every gradient; slow."""
    average_in_collective: bool = False
    """Have the reduction average, instead of dividing before it."""
    disable_bucketing: bool = False
    """Reduce and gather without buckets."""
    calculate_per_token_loss: bool = False
    """Leave gradients undivided, for a loss that is divided by tokens elsewhere."""
    keep_fp8_transpose_cache: bool = False
    """Keep transposed FP8 weights."""
    nccl_ub: bool = False
    """Use NCCL's user buffers."""
    fsdp_double_buffer: bool = False
    """Use two buffers in turn."""
    activation_checkpointing: bool = False
    """Compute layers again in their backward."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        _choice(problems, "zero_dp_strategy", self.zero_dp_strategy, (0, 1, 2, 3))
        refuse("MegatronFSDPConfig makes no sense", problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; `MegatronFSDPConfig(**config.to_dict())` is the same config."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class MoEParallelizerConfig:
    """What concerns mixture-of-experts layers alone."""

    ignore_router_for_ac: bool = True
    """Selective checkpointing keeps what the router computed."""
    reshard_after_forward: bool = False
    """Give up gathered expert weights after the forward."""
    mp_policy: MixedPrecisionPolicy | None = None
    """Dtypes of the experts; None: those of the rest."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


StrategyConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig
STRATEGIES: dict[str, type[FSDP2Config] | type[DDPConfig] | type[MegatronFSDPConfig]] = {
    "fsdp2": FSDP2Config,
    "ddp": DDPConfig,
    "megatron_fsdp": MegatronFSDPConfig,
}
"""Configs by the names that a file gives them."""


def _common_problems(config: FSDP2Config | DDPConfig) -> list[str]:
    problems: list[str] = []
    checkpointing = config.activation_checkpointing
    _choice(problems, "activation_checkpointing", checkpointing, (False, True, "full", "selective"))
    scopes = config.activation_checkpointing_scope
    for scope in scopes if isinstance(scopes, list) else [scopes]:
        _choice(problems, "activation_checkpointing_scope", scope, get_args(CheckpointingScope))
    dtype = config.autocast_dtype
    if dtype is not None and _as_dtype(dtype) is None:
        problems.append(f"autocast_dtype={dtype!r} is no dtype; use torch.bfloat16, or 'bfloat16'")
    return problems


def _as_dtype(given: object) -> torch.dtype | None:
    if isinstance(given, str):
        given = getattr(torch, given.removeprefix("torch."), None)
    return given if isinstance(given, torch.dtype) else None


def _choice(problems: list[str], name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(
        value is choice or (value == choice and type(value) is type(choice)) for choice in choices
    ):
        problems.append(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")
