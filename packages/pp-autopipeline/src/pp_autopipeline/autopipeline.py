"""AutoPipeline: a Hugging Face model, split over ranks, behind one `step`."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from pp_autopipeline.batch_rules import BatchRules
from pp_autopipeline.checks import field_problems, mesh_problems, refuse, warn_once
from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.devices import resolve_device
from pp_autopipeline.execution import Execution, StepOutput
from pp_autopipeline.layer_counts import BalanceBy, balance_problems
from pp_autopipeline.loss import BatchLoss
from pp_autopipeline.loss_probe import (
    LossFunction,
    LossReduction,
    find_loss_reduction,
    special_ids,
)
from pp_autopipeline.parallelize.axes import data_groups
from pp_autopipeline.parallelize.fsdp2 import reduce_every_microbatch
from pp_autopipeline.parallelize.whole_backward import keep_backwards_whole
from pp_autopipeline.pipeline import (
    BuiltPipeline,
    ParallelizeFnProtocol,
    bind_parallelize_fn,
    build_pipeline,
    plan_pipeline,
    set_shapes,
)
from pp_autopipeline.pretrained import load_pretrained, save_pretrained
from pp_autopipeline.receive_pool import install_pool
from pp_autopipeline.reports import PipelineReports
from pp_autopipeline.stage_summary import StageSummary, summarize_stages
from pp_bufferpool import RecvBufferPool
from pp_schedule import resolve_schedule, use_stage_shapes
from pp_split_hf import Saveable, allocate_stage_weights, initialize_stage_weights

logger = logging.getLogger(__name__)

__all__ = ["AutoPipeline", "AutoPipelineInfo", "StepOutput"]


@dataclass(frozen=True)
class AutoPipelineInfo:
    """What this rank has of a built pipeline."""

    enabled: bool
    """Whether there is more than one pipeline rank."""
    schedule: Any
    """torch's schedule."""
    has_first_stage: bool
    """Whether this rank takes the token ids."""
    has_last_stage: bool
    """Whether this rank computes the loss."""
    model_parts: list[nn.Module]
    """Modules of this rank's stages."""
    stages: list[PipelineStage]
    """torch's stages of this rank."""


@dataclass
class AutoPipeline(PipelineReports):
    """Pipeline-parallel training of a Hugging Face model in a loop of one's own.

    Every rank of the pipeline makes it alike and calls `build`, `step` and `eval` alike, each time
    with the whole batch.

    Example:
        >>> ap = AutoPipeline(world_mesh, pp_schedule="1f1b", pp_batch_size=8)
        >>> ap.build(model, loss_fn=loss_fn).materialize(seed=0)
        >>> loss = ap.step(input_ids, target=labels).loss
    """

    world_mesh: DeviceMesh
    """The mesh that has the pipeline axis."""
    moe_mesh: DeviceMesh | None = None
    """The mesh for experts, handed on to `parallelize_fn`."""
    pp_axis_name: str = "pp"
    """The pipeline axis."""
    dp_axis_names: tuple[str, ...] = ("dp",)
    """Data-parallel axes, handed on to `parallelize_fn`."""
    cp_axis_name: str | None = None
    """Context-parallel axis, handed on to `parallelize_fn`."""
    tp_axis_name: str | None = None
    """Tensor-parallel axis, handed on to `parallelize_fn`."""
    ep_axis_name: str | None = None
    """Expert-parallel axis, handed on to `parallelize_fn`."""
    ep_shard_axis_names: tuple[str, ...] | None = None
    """Axes over which experts are sharded, handed on to `parallelize_fn`."""
    pp_schedule: str | None = "1f1b"
    """Schedule name; see `pp_schedule.resolve_schedule`. "auto" has the planner choose schedule,
    split and stages per rank, in no more memory than 1F1B takes."""
    pp_schedule_csv: str | None = None
    """Path of a compute-only schedule CSV; overrides `pp_schedule`."""
    pp_microbatch_size: int = 1
    """Rows per microbatch."""
    pp_batch_size: int = 1
    """Rows per step, a multiple of `pp_microbatch_size`."""
    layers_per_stage: int | None = None
    """Decoder layers per stage; None spreads them evenly over one stage per rank (single-stage
    schedules) or two."""
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    """"up" or "down": round the number of stages that `layers_per_stage` makes."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names per stage, for all stages; overrides automatic splitting."""
    patch_inner_model: bool = True
    """Handle the boundary inside the decoder; see `pp_patch_hf.patch_hf_model_for_pp`."""
    patch_causal_lm_model: bool = True
    """Have the outermost module return a tensor; see `pp_patch_hf.patch_hf_model_for_pp`."""
    patch_stage_backward_maybe_with_nosync: bool = False
    """Kept for configs of NeMo AutoModel; torch 2.13+ accumulates without it."""
    defer_fsdp_grad_sync: bool = True
    """Reduce the gradients of sharded stages once per step; else after every microbatch, so that
    no rank holds a stage's whole gradient between microbatches."""
    device: torch.device | str | int | None = None
    """Device of this rank's stages; None means the mesh's current one."""
    dtype: torch.dtype | None = None
    """Dtype of floating point parameters; None keeps the model's."""
    scale_grads_in_schedule: bool = False
    """For steps of the bare schedule (`info.schedule.step`): divide gradients by the number of
    microbatches. `step` needs no such scaling."""
    pp_seq_len: int | None = None
    """Sequence length for steps of the bare schedule; `step` sees it from its batch."""
    pp_recv_buffer_pool: bool = False
    """Give receive buffers by lifetime; see `pp_bufferpool`."""
    pp_recv_buffer_pool_slack: int = 2
    """Buffers beyond what is in flight."""
    check_batches: bool = False
    """Before every batch, compare what the ranks of the pipeline were given, and raise on all of
    them if that differs. For debugging: it waits for the device, and for the slowest rank."""
    loss_reduction: LossReduction | None = None
    """Whether `loss_fn` is a "mean" or a "sum" over the targets that are not -100; None finds out
    by calling it on random logits."""
    balance: BalanceBy = "layers"
    """What is to be even over stages: "layers", "cost" (of a microbatch, see `estimate_costs`; of
    `pp_seq_len` tokens, else of as many as the model takes, 4096 at most), or costs that were
    measured, the same on every rank."""

    def __post_init__(self) -> None:
        axes = {"pp_axis_name": self.pp_axis_name, "cp_axis_name": self.cp_axis_name}
        axes["tp_axis_name"] = self.tp_axis_name
        if self.dp_axis_names != ("dp",):  # the default names an axis that a mesh need not have
            axes |= {f"dp_axis_names[{i}]": axis for i, axis in enumerate(self.dp_axis_names)}
        problems = mesh_problems(self.world_mesh, "world_mesh", axes)
        if self.moe_mesh is not None:
            problems += mesh_problems(
                self.moe_mesh, "moe_mesh", {"ep_axis_name": self.ep_axis_name}
            )
        if self.loss_reduction not in (None, "mean", "sum"):
            problems.append(
                f"loss_reduction={self.loss_reduction!r} is none of 'mean', 'sum', None"
            )
        problems += balance_problems(self.balance)
        try:
            self.device = resolve_device(self.device, self.world_mesh)
        except (ValueError, RuntimeError) as error:
            problems.append(str(error))
        names = [field.name for field in fields(PipelineConfig) if field.name != "loss_fn"]
        settings = {name: getattr(self, name) for name in names}
        problems += field_problems({**settings, "loss_fn": None})
        refuse("AutoPipeline cannot be made", problems)
        self._config = PipelineConfig(**settings)
        self._loss_fn: LossFunction | None = None
        self._built: BuiltPipeline | None = None
        self._execution: Execution | None = None
        self._pool: RecvBufferPool | None = None
        self._summaries: tuple[StageSummary, ...] = ()
        self._is_loaded = False

    @classmethod
    def from_config(
        cls, world_mesh: DeviceMesh, config: PipelineConfig, **others: Any
    ) -> "AutoPipeline":
        """Make a pipeline from a config; its `loss_fn` is what `build` uses unless given another.

        Args:
            world_mesh: The mesh that has the pipeline axis.
            config: Everything that a config has.
            **others: Everything that it has not: `moe_mesh`, axis names, `device`, ...
        """
        settings = config.to_dict()
        loss_fn = settings.pop("loss_fn")
        pipeline = cls(world_mesh, **settings, **others)
        pipeline._loss_fn = loss_fn
        return pipeline

    def build(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction | None = None,
        parallelize_fn: ParallelizeFnProtocol | None = None,
    ) -> "AutoPipeline":
        """Split the model and build this rank's stages and schedule. Nothing is sent.

        The stages share their parameters with `model`, and the model is not changed. Only what is
        not on `device` and in `dtype` yet becomes a tensor of the stage's own (let go of `model`
        to free the other). Meta parameters stay until `materialize`.

        Args:
            model: The whole model, on any device; the same on every rank.
            loss_fn: `loss_fn(logits, target)` for one microbatch, a mean or a sum over the targets
                that are not -100. Without it the pipeline only evaluates.
            parallelize_fn: Called on each of this rank's stage modules, to work in place.

        Raises:
            ValueError: Listing everything that is wrong with model, mesh and settings.
        """
        assert isinstance(self.device, torch.device)
        loss_fn = loss_fn or self._loss_fn
        axes = self._axes()
        compute_dtype = getattr(parallelize_fn, "compute_dtype", None)
        plan = plan_pipeline(
            model,
            self.world_mesh,
            self.pp_axis_name,
            self._config,
            self.balance,
            compute_dtype(**axes) if callable(compute_dtype) else compute_dtype,
        )
        rules = BatchRules.of(model, plan.layout)
        batch_loss = None
        if loss_fn is not None:
            reduction = self.loss_reduction or find_loss_reduction(
                loss_fn, rules.num_classes, self.device, special_ids(model), rules.target_kind
            )
            share = 1.0 / self._config.num_microbatches if self.scale_grads_in_schedule else 1.0
            replicas = data_groups(self.world_mesh, self.dp_axis_names)
            batch_loss = BatchLoss(loss_fn, reduction, share, replicas)
        self._warn_of_settings_without_effect()
        self._summaries = summarize_stages(model, plan.stage_fqns, plan.rank_of_stage)
        self._built = build_pipeline(
            model,
            plan,
            self.world_mesh,
            self.pp_axis_name,
            # The loss brings its own scaling.
            replace(self._config, scale_grads_in_schedule=False),
            loss_fn=batch_loss,
            device=self.device,
            parallelize=bind_parallelize_fn(parallelize_fn, **axes),
        )
        self._execution = Execution(
            self._built,
            batch_loss,
            self.world_mesh.get_group(self.pp_axis_name),
            self.device,
            self._config,
            rules,
            self.check_batches,
        )
        if not self.defer_fsdp_grad_sync:
            sharded = [reduce_every_microbatch(part) for part in self._built.parts]
            if not any(sharded):
                warn_once(
                    logger,
                    "defer_fsdp_grad_sync=False has no effect: parallelize_fn shards no stage as a "
                    "whole (fully_shard)",
                )
            keep_backwards_whole(self._built.stages, self._built.parts, self._built.schedule)
        if self.pp_recv_buffer_pool:
            self._pool = install_pool(self._built, self.pp_recv_buffer_pool_slack)
        if self.pp_seq_len is not None:
            self.update_seq_len(self.pp_seq_len)
        return self

    def materialize(self, seed: int = 0, *, values: bool = True) -> "AutoPipeline":
        """Give parameters that are on the meta device memory and their first values.

        Values are those of the model's own initialisation from its config. They depend on `seed`
        and parameter names alone: any number of ranks and any split start alike. Make optimizers
        afterwards. Every rank calls it; only tied weights are sent.

        Args:
            seed: Same seed, same weights.
            values: False for memory alone, which `Checkpoints.load` is going to fill.
        """
        parts = self._require().parts
        assert isinstance(self.device, torch.device)
        if not values:
            for part in parts:
                allocate_stage_weights(part, self.device, self.dtype)
            self._require().tied.reshare()
            return self
        source = "" if self._is_loaded else getattr(parts[0], "name_or_path", "")
        if source and any(p.device.type == "meta" for part in parts for p in part.parameters()):
            warn_once(
                logger,
                f"materialize() makes new weights from the config; those of {source!r} are not "
                f"read. To train them, call load_pretrained({source!r}) instead",
            )
        for part in parts:
            initialize_stage_weights(part, self.device, self.dtype, seed)
        self._require().tied.reshare()
        self._require().tied.broadcast()
        return self

    def load_pretrained(
        self,
        checkpoint: str | Path,
        *,
        allow_missing: bool = False,
        allow_unexpected: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> "AutoPipeline":
        """Read the weights of this rank's stages from a Hugging Face checkpoint, and no others.

        For a model that was built under `init_empty_weights`, in place of `materialize`: no rank
        ever has the whole model. Make optimizers afterwards. Every rank calls it, and all or none
        of them raise. See `pp_split_hf.load_stage_weights`.

        Args:
            checkpoint: A folder with safetensors files, one such file, or a hub id.
            allow_missing: Leave on the meta device what the checkpoint does not have, such as a new
                head; call `materialize` then.
            allow_unexpected: Leave out what the checkpoint has and the model has not, such as the
                head of another task.
            progress: Called with the bytes that this rank has read so far and will read in all.

        Raises:
            CheckpointError: Listing what is missing, unexpected, of another shape or cut off.
            RuntimeError: If a rank could not read.
        """
        assert isinstance(self.device, torch.device)
        load_pretrained(
            self._require(),
            self.world_mesh,
            checkpoint,
            self.device,
            self.dtype,
            allow_missing,
            allow_unexpected,
            progress,
        )
        self._is_loaded = True
        return self

    def save_pretrained(
        self,
        path: str | Path,
        *,
        tokenizer: Saveable | None = None,
        max_shard_size: int = 5_000_000_000,
    ) -> None:
        """Write all stages as one Hugging Face checkpoint that `from_pretrained` loads.

        Every rank calls it and writes what it has; all or none of them raise. The folder is
        complete or absent. See `pp_split_hf.save_pretrained_pipeline`.

        Args:
            path: The folder, on a file system that all ranks share; replaced, with all that is in
                it, if it holds a checkpoint.
            tokenizer: Saved along; a processor as well.
            max_shard_size: The most bytes of tensors in a file.

        Raises:
            RuntimeError: If a rank could not write; what was at `path` before is still there.
        """
        built = self._require()
        save_pretrained(built, self.world_mesh, self.pp_axis_name, path, tokenizer, max_shard_size)

    def sync_tied_gradients(self) -> None:
        """Sum the gradients of weights that are tied over ranks, for loops of the bare schedule.

        Every rank calls it once before each optimizer step; without it that step is an error.
        `step` does it by itself.
        """
        self._require().tied.sync()

    def step(
        self,
        input_ids: torch.Tensor,
        *,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepOutput:
        """Run forward and backward of one batch; gradients add to what is there.

        Loss and gradients are those of the whole batch whatever the number of microbatches: a mean
        loss is the mean over all targets of the batch that are not -100, a sum loss their sum. A
        batch in which nothing counts has loss 0 and no gradients beyond zeros.

        Every rank of the pipeline calls it with the same whole batch.

        Args:
            input_ids: Token ids `[pp_batch_size, S]`; S may differ from call to call.
            target: Labels `[pp_batch_size, S]`, aligned with the logits.
            losses: A list to fill, on the last stage's rank, with the detached loss of each
                microbatch as `loss_fn` gave it.
            return_outputs: Keep and return the logits; they are dropped otherwise.
            **kwargs: Further arguments of the model's forward (`attention_mask`, `position_ids`,
                ...), for the whole batch; each is cut along its batch dim or shared. Of
                `pixel_values`, `image_grid_thw` and their like, which have no row per text, each
                microbatch gets those whose placeholder tokens are in its `input_ids`.

        Returns:
            The loss, equal on every rank, and the logits if asked.

        Raises:
            ValueError: On every rank alike, before anything is sent.
        """
        return self._run().train(input_ids, target, losses, return_outputs, kwargs)

    def eval(
        self,
        input_ids: torch.Tensor,
        *,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepOutput:
        """Run the forward of one batch in evaluation mode, without touching gradients.

        As `step`, but the batch may have any multiple of `pp_microbatch_size` rows, and `target`
        may be left out; then there is no loss. Works for every schedule.
        """
        return self._run().evaluate(input_ids, target, losses, return_outputs, kwargs)

    def update_seq_len(self, seq_len: int) -> None:
        """Tell the stages the sequence length of steps of the bare schedule (`info.schedule`).

        Every rank calls it. `step` and `eval` see the length from their batch and need no call.
        """
        built = self._require()
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        set_shapes(built, self.pp_microbatch_size, seq_len)
        use_stage_shapes(built.schedule)
        assert self._execution is not None
        self._execution.forget_shapes()

    @property
    def info(self) -> AutoPipelineInfo:
        """What this rank has of the pipeline."""
        built = self._require()
        plan = built.plan
        mine = plan.stage_ids[plan.pp_rank]
        return AutoPipelineInfo(
            len(plan.stage_ids) > 1,
            built.schedule,
            0 in mine,
            len(plan.stage_fqns) - 1 in mine,
            built.parts,
            built.stages,
        )

    @property
    def parts(self) -> list[nn.Module]:
        """Modules of this rank's stages; parameter names are those of the whole model."""
        return self._require().parts

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter of this rank's stages once, for an optimizer.

        A weight that is tied over two stages of this rank is in two parts, and one parameter.
        """
        seen: set[int] = set()
        for part in self.parts:
            for parameter in part.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    @property
    def recv_buffer_pool(self) -> RecvBufferPool | None:
        """The pool, if there is one."""
        return self._pool

    def _axes(self) -> dict[str, Any]:
        """Meshes and axes, as `parallelize_fn` takes them."""
        return {
            "world_mesh": self.world_mesh,
            "moe_mesh": self.moe_mesh,
            "dp_axis_names": self.dp_axis_names,
            "cp_axis_name": self.cp_axis_name,
            "tp_axis_name": self.tp_axis_name,
            "ep_axis_name": self.ep_axis_name,
            "ep_shard_axis_names": self.ep_shard_axis_names,
        }

    def _require(self) -> BuiltPipeline:
        if self._built is None:
            raise RuntimeError(
                "the pipeline is not built yet: call build(model, loss_fn=...) first"
            )
        return self._built

    def _run(self) -> Execution:
        self._require()
        assert self._execution is not None
        return self._execution

    def _warn_of_settings_without_effect(self) -> None:
        if self.world_mesh[self.pp_axis_name].size() == 1:
            warn_once(
                logger,
                f"axis {self.pp_axis_name!r} of world_mesh has size 1: all stages are on one rank, "
                "and pipeline settings only cut the batch into microbatches",
            )
        if self.module_fqns_per_model_part is not None and self.balance != "layers":
            given = "'cost'" if isinstance(self.balance, str) else "Costs(...)"
            warn_once(
                logger,
                f"balance={given} has no effect: module_fqns_per_model_part says what each stage has",
            )
        name = self.pp_schedule if self.pp_schedule_csv is None else None
        automatic = name is not None and resolve_schedule(name).name == "auto"
        if automatic and self.layers_per_stage is not None:
            warn_once(
                logger,
                f"layers_per_stage={self.layers_per_stage} has no effect: pp_schedule='auto' "
                "chooses the stages",
            )
        if self.patch_stage_backward_maybe_with_nosync:
            warn_once(
                logger,
                "patch_stage_backward_maybe_with_nosync=True has no effect: torch 2.13 and later "
                "accumulate FSDP gradients over microbatches by themselves",
            )
