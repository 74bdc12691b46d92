"""What does not go together."""

from pp_autopipeline.parallelize.config import (
    ActivationCheckpointing,
    DDPConfig,
    FSDP2Config,
    StrategyConfig,
)


def combination_problems(
    strategy: StrategyConfig, checkpointing: ActivationCheckpointing | None, **sizes: int
) -> list[str]:
    """Return what keeps a strategy from running on axes of these sizes.

    Args:
        strategy: How to shard or replicate.
        checkpointing: The mode in effect; None: that of the strategy.
        **sizes: `pp_size`, `tp_size`, `cp_size`, `ep_size`, `dp_replicate_size`; 1 if not given.
    """
    problems = []
    name = type(strategy).__name__
    if not isinstance(strategy, FSDP2Config):
        if sizes.get("pp_size", 1) > 1:
            problems.append(
                f"{name} does not go with a pipeline: pp_size is {sizes['pp_size']}. Use "
                "FSDP2Config, or pp_size=1"
            )
        for axis in ("tp_size", "cp_size", "ep_size"):
            if sizes.get(axis, 1) > 1:
                problems.append(f"{name} does not go with {axis}={sizes[axis]}: use FSDP2Config")
    if isinstance(strategy, DDPConfig) and sizes.get("dp_replicate_size", 1) > 1:
        problems.append(
            f"DDPConfig replicates over all data-parallel ranks: dp_replicate_size="
            f"{sizes['dp_replicate_size']} is for FSDP2Config"
        )
    mode = strategy.activation_checkpointing if checkpointing is None else checkpointing
    if mode == "selective" and sizes.get("ep_size", 1) > 1:
        problems.append(
            f"activation_checkpointing='selective' does not go with ep_size={sizes['ep_size']}: "
            "Transformers' dispatch writes into what would be kept; use 'full'"
        )
    return problems
