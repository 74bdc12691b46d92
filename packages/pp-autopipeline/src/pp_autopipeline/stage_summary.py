"""What a pipeline looks like, in global stage numbers and for the whole model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StageSummary:
    """One stage of the pipeline, whichever rank it is on."""

    stage_index: int
    """Global index."""
    rank: int
    """Pipeline rank that runs it."""
    modules: tuple[str, ...]
    """FQNs of its modules."""
    num_params: int
    """Parameters it owns, trainable or not."""
    num_trainable_params: int
    """Those that are trained."""
    share: float
    """Its part of the whole model's parameters, 0 to 1."""

    @property
    def folded_modules(self) -> list[str]:
        """The module names with runs of numbers folded: `model.layers.0-3`."""
        return fold_names(self.modules)


def summarize_stages(
    model: nn.Module, stage_fqns: Sequence[Sequence[str]], rank_of_stage: Sequence[int]
) -> tuple[StageSummary, ...]:
    """Return a summary of every stage, counted on the whole model."""
    sizes = {name: (p.numel(), p.requires_grad) for name, p in model.named_parameters()}
    total = sum(size for size, _ in sizes.values())
    summaries = []
    for stage, names in enumerate(stage_fqns):
        mine = [
            size
            for name, size in sizes.items()
            if any(name == fqn or name.startswith(f"{fqn}.") for fqn in names)
        ]
        num_params = sum(size for size, _ in mine)
        summaries.append(
            StageSummary(
                stage,
                rank_of_stage[stage],
                tuple(names),
                num_params,
                sum(size for size, trainable in mine if trainable),
                num_params / total if total else 0.0,
            )
        )
    return tuple(summaries)


def fold_names(names: Sequence[str]) -> list[str]:
    """Return module names with runs of numbers folded: `model.layers.0-3`."""
    folded: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        if match and run and run[0] == match[1] and int(match[2]) == run[2] + 1:
            run = (run[0], run[1], int(match[2]))
            folded[-1] = f"{run[0]}{run[1]}-{run[2]}"
        else:
            run = (match[1], int(match[2]), int(match[2])) if match else None
            folded.append(name)
    return folded


def stage_table(summaries: Sequence[StageSummary], max_modules_per_stage: int) -> str:
    """Return the stages as a table: index, rank, parameters, share, modules."""
    rows = [("stage", "rank", "parameters", "share", "modules")]
    for summary in summaries:
        modules = summary.folded_modules
        shown = modules[:max_modules_per_stage]
        more = len(modules) - len(shown)
        rows.append(
            (
                str(summary.stage_index),
                str(summary.rank),
                f"{summary.num_params:,}",
                f"{100 * summary.share:.1f} %",
                ", ".join(shown) + (f", and {more} more" if more else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]
        )
        for row in rows
    )
