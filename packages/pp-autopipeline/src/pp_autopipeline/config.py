"""PipelineConfig: everything about a pipeline that a file can say."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pp_autopipeline.checks import field_problems, warn_once

logger = logging.getLogger(__name__)


@dataclass
class PipelineConfig:
    """Configuration of pipeline-parallel training; the mesh is given separately.

    Field names, meanings and defaults are those of NeMo AutoModel 0.7. `AutoPipeline.from_config`
    takes it.

    Raises:
        ValueError: Naming all fields that are wrong, when the config is made.
    """

    pp_schedule: str | None = "1f1b"
    """Schedule name: 1f1b, gpipe, interleaved_1f1b, looped_bfs, dfs, v_schedule, zero_bubble, any
    of torch's own, or auto, which has the planner choose schedule and split."""
    pp_schedule_csv: str | None = None
    """Path of a compute-only schedule CSV; overrides `pp_schedule`."""
    pp_microbatch_size: int = 1
    """Rows per microbatch."""
    pp_batch_size: int = 1
    """Rows per step and pipeline, a multiple of `pp_microbatch_size`."""
    layers_per_stage: int | None = None
    """Decoder layers per stage; None spreads them evenly, one stage per rank (single-stage
    schedules) or two."""
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    """Round the number of stages that `layers_per_stage` makes to a multiple of the ranks."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names per stage, for all stages; overrides automatic splitting."""
    patch_inner_model: bool = True
    """Handle the stage boundary inside the decoder; see `patch_hf_model_for_pp`."""
    patch_causal_lm_model: bool = True
    """Have the outermost module return a tensor; see `patch_hf_model_for_pp`."""
    patch_stage_backward_maybe_with_nosync: bool = False
    """Accumulate FSDP gradients without a reduction per microbatch; torch 2.13+ does so itself."""
    dtype: torch.dtype | None = None
    """Dtype of the pipeline's parameters; None keeps the model's."""
    scale_grads_in_schedule: bool = False
    """Divide gradients by the number of microbatches inside the schedule."""
    loss_fn: Callable[..., torch.Tensor] | None = None
    """Called as `loss_fn(logits, target)` for each microbatch on the last stage."""
    pp_seq_len: int | None = None
    """Sequence length, where it is known beforehand."""
    pp_recv_buffer_pool: bool = False
    """Give receive buffers by lifetime instead of one per microbatch (1F1B)."""
    pp_recv_buffer_pool_slack: int = 2
    """Buffers beyond what is in flight."""

    def __post_init__(self) -> None:
        problems = field_problems(self.to_dict())
        if problems:
            raise ValueError("PipelineConfig: " + "; ".join(problems))
        if self.pp_schedule_csv is not None and self.pp_schedule not in (None, "1f1b"):
            warn_once(
                logger,
                f"pp_schedule={self.pp_schedule!r} has no effect: pp_schedule_csv="
                f"{self.pp_schedule_csv!r} overrides it",
            )
        if self.round_virtual_stages_to_pp_multiple and self.layers_per_stage is None:
            warn_once(
                logger,
                f"round_virtual_stages_to_pp_multiple={self.round_virtual_stages_to_pp_multiple!r} "
                "has no effect without layers_per_stage",
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        return self.pp_batch_size // self.pp_microbatch_size

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that `from_dict` takes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PipelineConfig":
        """Make a config from a dictionary; a dtype may be a name such as "bfloat16".

        Raises:
            ValueError: For unknown names and bad values, all in one message.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"PipelineConfig has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        values = dict(values)
        dtype = values.get("dtype")
        if isinstance(dtype, str):
            values["dtype"] = getattr(torch, dtype.removeprefix("torch."), None)
            if not isinstance(values["dtype"], torch.dtype):
                raise ValueError(f"dtype={dtype!r} is no torch dtype such as 'bfloat16'")
        return cls(**values)
