"""What a built pipeline tells of itself."""

from abc import ABC, abstractmethod
from pathlib import Path

from pp_autopipeline.layer_counts import BalanceBy, describe_balance
from pp_autopipeline.pipeline import BuiltPipeline
from pp_autopipeline.stage_summary import StageSummary, stage_table
from pp_schedule import (
    Balance,
    chrome_trace,
    draw_html,
    draw_png,
    draw_text,
    schedule_order,
    simulate,
)
from pp_schedule.orders import Order


class PipelineReports(ABC):
    """The part of `AutoPipeline` that reads and never acts."""

    pp_schedule: str | None
    pp_schedule_csv: str | None
    pp_microbatch_size: int
    pp_batch_size: int
    device: object
    balance: BalanceBy
    _summaries: tuple[StageSummary, ...]

    @abstractmethod
    def _require(self) -> BuiltPipeline:
        """Return what was built, or raise."""

    @property
    def schedule_order(self) -> Order:
        """The actions of every rank, for `pp_schedule.draw_text` and the simulator."""
        return schedule_order(self._require().schedule)

    @property
    def stage_summaries(self) -> tuple[StageSummary, ...]:
        """A summary of every stage of the pipeline, whichever rank it is on."""
        self._require()
        return self._summaries

    @property
    def balance_report(self) -> Balance | None:
        """How even the ranks' shares of the work are, beside those of an even split by layers.

        None if costs did not decide.
        """
        return self._require().plan.balance

    @property
    def _schedule_name(self) -> str:
        name = self.pp_schedule_csv or self.pp_schedule or ""
        chosen = self._require().plan.schedule
        return name if chosen == name else f"{name}: {chosen}"

    def list_stage_modules(self) -> list[list[str]]:
        """Return the module names of each of this rank's stages."""
        plan = self._require().plan
        return [list(plan.stage_fqns[i]) for i in sorted(plan.stage_ids[plan.pp_rank])]

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """Return the number of parameters of every stage of the pipeline, by global index."""
        return [
            s.num_trainable_params if trainable_only else s.num_params for s in self.stage_summaries
        ]

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """Return the number of parameters of the whole model."""
        return sum(self.get_stage_param_counts(trainable_only))

    def debug_summary(self) -> str:
        """Return sizes, schedule and stages in a few lines."""
        built = self._require()
        plan = built.plan
        num_microbatches = self.pp_batch_size // self.pp_microbatch_size
        name = self._schedule_name
        bubble = simulate(self.schedule_order).bubble_fraction
        total, trainable = (self.get_total_param_count(flag) for flag in (False, True))
        mine = ", ".join(map(str, sorted(plan.stage_ids[plan.pp_rank])))
        return "\n".join(
            [
                f"pipeline: {len(plan.stage_ids)} ranks, {len(plan.stage_fqns)} stages",
                f"schedule: {name} ({type(built.schedule).__name__}), {num_microbatches} "
                f"microbatches of {self.pp_microbatch_size}, expected bubble {100 * bubble:.1f} %",
                f"whole model: {total:,} parameters, {trainable:,} trainable",
                *self._balance_lines(),
                f"this rank: pipeline rank {plan.pp_rank} on {self.device}, stages {mine}",
                *(
                    f"  stage {s.stage_index}: {s.num_params:,} parameters "
                    f"({100 * s.share:.1f} % of the model)"
                    for s in self._summaries
                    if s.rank == plan.pp_rank
                ),
            ]
        )

    def _balance_lines(self) -> list[str]:
        plan = self._require().plan
        if plan.balance is None:
            return []
        unit = "FLOPs" if isinstance(self.balance, str) else "(in the unit of the costs)"
        return describe_balance(plan.balance, plan.stage_ids, unit)

    def pretty_print_stages(self, max_modules_per_stage: int = 16) -> str:
        """Return a table of all stages of the pipeline, in global numbers."""
        return stage_table(self.stage_summaries, max_modules_per_stage)

    def visualize_current_schedule(self, path: str | Path) -> None:
        """Write a picture of the schedule; any one rank may call it.

        Args:
            path: Where to write. Its suffix tells what: `.png` (needs `pp-schedule[plot]`), `.html`
                (a page to zoom into), `.json` (a trace for ui.perfetto.dev) or `.txt`.

        Raises:
            ValueError: If the suffix is another one.
        """
        order, suffix = self.schedule_order, Path(path).suffix
        title = f"{self._schedule_name}, {len(self._summaries)} stages"
        if suffix == ".png":
            draw_png(order, path, title=title)
        elif suffix == ".html":
            draw_html(order, path, title=title)
        elif suffix == ".json":
            chrome_trace(order, path, title=title)
        elif suffix == ".txt":
            Path(path).write_text(f"{title}\n{draw_text(order)}\n", encoding="utf-8")
        else:
            raise ValueError(
                f"{str(path)!r} does not tell what to draw: its suffix must be one of .png, .html, "
                ".json, .txt"
            )
