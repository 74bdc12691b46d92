"""One batch through the pipeline: checked, cut, run, and its loss brought to every rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pp_autopipeline.agreement import pipeline_differences
from pp_autopipeline.batch_check import batch_differences
from pp_autopipeline.batch_rules import BatchRules
from pp_autopipeline.checks import refuse
from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.images import place_images
from pp_autopipeline.loss import BatchLoss
from pp_autopipeline.lost_peers import lost_peers_named
from pp_autopipeline.microbatch import find_batch_dims
from pp_autopipeline.pipeline import BuiltPipeline, set_shapes
from pp_schedule import (
    build_forward_only_schedule,
    set_keyword_split,
    use_stage_shapes,
)
from pp_split_hf import stage_part


@dataclass(frozen=True)
class StepOutput:
    """What a step or an evaluation gives."""

    loss: torch.Tensor | None
    """The loss of the whole batch, detached, 0-dim, float64, equal on every rank; None without a target."""
    logits: torch.Tensor | None
    """Logits of the whole batch on the last stage's rank, if asked for; else None."""


class Execution:
    """Runs batches through one built pipeline."""

    def __init__(
        self,
        pipeline: BuiltPipeline,
        batch_loss: BatchLoss | None,
        group: dist.ProcessGroup,
        device: torch.device,
        config: PipelineConfig,
        rules: BatchRules,
        check_batches: bool,
    ) -> None:
        self.pipeline = pipeline
        self.batch_loss = batch_loss
        self.group = group
        self.device = device
        self.microbatch_size = config.pp_microbatch_size
        self.batch_size = config.pp_batch_size
        self.rules = rules
        self.check_batches = check_batches
        # A module that is its own stage forward gets what it would get from torch's schedules.
        self.is_patched = config.patch_inner_model or config.patch_causal_lm_model
        plan = pipeline.plan
        mine = plan.stage_ids[plan.pp_rank]
        self.has_first = 0 in mine
        self.has_last = len(plan.stage_fqns) - 1 in mine
        self._forward_only: dict[tuple[int, bool], Any] = {}
        self._prepared: tuple[Any, int] | None = None
        self._is_checked = False
        self._is_agreed = False
        if rules.images is not None:
            for module in pipeline.parts:
                part = stage_part(module)
                assert part is not None
                place_images(module, part.is_first)

    def forget_shapes(self) -> None:
        """Set shapes afresh at the next batch."""
        self._prepared = None

    def train(
        self,
        input_ids: torch.Tensor,
        target: torch.Tensor | None,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
        kwargs: dict[str, Any],
    ) -> StepOutput:
        """Forward and backward of one batch; see `AutoPipeline.step`."""
        self._compare("step", input_ids, target, kwargs)
        problems = self.rules.problems(input_ids, target, kwargs)
        if self.batch_loss is None:
            problems.append("the pipeline was built without loss_fn: only eval() runs")
        elif target is None:
            problems.append("target is missing: every rank passes the whole batch and its target")
        if not torch.is_grad_enabled():
            problems.append("gradients are disabled (torch.no_grad): use eval() to evaluate")
        rows = input_ids.shape[0] if input_ids.ndim else 0
        if rows != self.batch_size:
            problems.append(
                f"input_ids has {rows} rows, but pp_batch_size={self.batch_size}: pad the batch "
                "with rows whose targets are all -100, or build with another pp_batch_size"
            )
        self._check(problems)
        num_microbatches = self.batch_size // self.microbatch_size
        schedule = self.pipeline.schedule
        with self._lost_peers_named(), self.pipeline.tied.summed():
            return self._run(
                schedule, num_microbatches, input_ids, target, losses, return_outputs, kwargs
            )

    def evaluate(
        self,
        input_ids: torch.Tensor,
        target: torch.Tensor | None,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
        kwargs: dict[str, Any],
    ) -> StepOutput:
        """Forward of one batch; see `AutoPipeline.eval`."""
        self._compare("eval", input_ids, target, kwargs)
        problems = self.rules.problems(input_ids, target, kwargs)
        if target is not None and self.batch_loss is None:
            problems.append("a target was given, but the pipeline was built without loss_fn")
        rows = input_ids.shape[0] if input_ids.ndim else 0
        if rows == 0 or rows % self.microbatch_size:
            problems.append(
                f"input_ids has {rows} rows, which is not a positive multiple of "
                f"pp_microbatch_size={self.microbatch_size}"
            )
        self._check(problems)
        num_microbatches = rows // self.microbatch_size
        schedule = self._forward_only_schedule(num_microbatches, target is not None)
        return_outputs = return_outputs or target is None
        with self._lost_peers_named(), torch.no_grad(), _evaluating(self.pipeline.parts):
            output = self._run(
                schedule, num_microbatches, input_ids, target, losses, return_outputs, kwargs
            )
        for stage in self.pipeline.stages:
            stage.clear_runtime_states()  # else inputs and logits stay until the next batch
        return output

    def _run(
        self,
        schedule: Any,
        num_microbatches: int,
        input_ids: torch.Tensor,
        target: torch.Tensor | None,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
        kwargs: dict[str, Any],
    ) -> StepOutput:
        # 1. Everything that can be wrong is found before anything is sent.
        images = None
        if self.rules.images is not None:
            images, kwargs = self.rules.images.cut(input_ids, kwargs, num_microbatches)
        batch_dims = find_batch_dims(kwargs, input_ids.shape[0], input_ids.shape[1])
        # 2. Every stage gets the ids: architectures make masks and positions from them.
        keywords = {**kwargs, "input_ids": input_ids} if self.is_patched else dict(kwargs)
        keywords = {
            name: value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in keywords.items()
        }
        if self.is_patched:
            batch_dims["input_ids"] = 0
        if images is not None:
            tables, table_dims = images.keywords(self.device, self.has_first)
            keywords |= tables
            batch_dims |= table_dims
        set_keyword_split(schedule, batch_dims)
        self._prepare(schedule, input_ids.shape[1])
        # 3. The loss must know the whole target before the first microbatch.
        if self.has_last and target is not None:
            assert self.batch_loss is not None
            target = target.to(self.device, non_blocking=True)
            self.batch_loss.begin(target, num_microbatches)
            if target.dtype in (torch.int32, torch.int16, torch.int8):
                target = target.long()  # torch's losses want no narrower labels
        # 4. The schedule.
        args = (input_ids.to(self.device, non_blocking=True),) if self.has_first else ()
        logits = schedule.step(
            *args,
            target=target if self.has_last else None,
            return_outputs=return_outputs,
            **keywords,
        )
        # 5. The loss, on every rank.
        loss = None if target is None else self._share_loss(losses)
        return StepOutput(loss, logits if return_outputs and self.has_last else None)

    def _share_loss(self, losses: list[torch.Tensor] | None) -> torch.Tensor:
        if losses is not None:
            losses.clear()
        # float64, since the other ranks do not know in which dtype the last stage computes.
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        if self.has_last:
            assert self.batch_loss is not None
            loss = self.batch_loss.end(self.device)
            if losses is not None:
                losses.extend(self.batch_loss.values)
        if len(self.pipeline.plan.stage_ids) > 1:
            source = dist.get_global_rank(self.group, self.pipeline.plan.rank_of_stage[-1])
            dist.broadcast(loss, source, group=self.group)
        return loss

    def _prepare(self, schedule: Any, seq_len: int) -> None:
        """Set shapes, if they or the schedule changed since the last batch."""
        if self._prepared == (schedule, seq_len):
            return
        set_shapes(self.pipeline, self.microbatch_size, seq_len)
        use_stage_shapes(schedule)
        self._prepared = (schedule, seq_len)

    def _forward_only_schedule(self, num_microbatches: int, with_loss: bool) -> Any:
        key = (num_microbatches, with_loss)
        if key not in self._forward_only:
            self._forward_only[key] = build_forward_only_schedule(
                self.pipeline.stages,
                self.pipeline.plan.stage_ids,
                num_microbatches,
                self.batch_loss if with_loss else None,
            )
        return self._forward_only[key]

    def _compare(
        self, call: str, input_ids: Any, target: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Raise on every rank if the ranks were given different batches, if that is to be checked."""
        if not self.check_batches or len(self.pipeline.plan.stage_ids) == 1:
            return
        self._check_agreement()  # ranks that do not compare batches would send something else
        batch = {"the call": call, "input_ids": input_ids, "target": target, **kwargs}
        with self._lost_peers_named():
            problems = batch_differences(batch, self.group)
        refuse(
            "the ranks of the pipeline were given different batches; give all of them the same "
            "(DataParallelSampler draws such)",
            problems,
        )

    def _check(self, problems: list[str]) -> None:
        if not self._is_checked:
            empty = [
                name
                for part in self.pipeline.parts
                for name, p in part.named_parameters()
                if p.device.type == "meta"
            ]
            if empty:
                problems.append(
                    f"{len(empty)} parameters have no values yet ({empty[0]}, ...): call "
                    "materialize() or load_pretrained() after build()"
                )
        refuse("cannot run this batch", problems)
        self._check_agreement()
        self._is_checked = True

    def _check_agreement(self) -> None:
        """Raise on every rank if the ranks were given different pipelines; look at it once."""
        if self._is_agreed:
            return
        settings = {
            "batch and microbatch size": (self.batch_size, self.microbatch_size),
            "check_batches": self.check_batches,
            "loss": self.batch_loss and self.batch_loss.reduction,
        }
        with self._lost_peers_named():
            problems = pipeline_differences(self.pipeline, settings, self.group)
        refuse(
            "the ranks of the pipeline were given different things; give all of them the same",
            problems,
        )
        self._is_agreed = True

    def _lost_peers_named(self) -> AbstractContextManager[None]:
        return lost_peers_named(self.pipeline.plan, self.group)


@contextmanager
def _evaluating(parts: list[nn.Module]) -> Iterator[None]:
    """Evaluation mode for all modules that are in training mode, for as long as it is open."""
    training = [module for part in parts for module in part.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
