"""What a run shows: its stages, its schedule, its progress, a sample."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from pp_recipe.options import TrainOptions
from pp_schedule import Order, draw_text, simulate

if TYPE_CHECKING:
    from pp_autopipeline import StageSummary


def show_stages(console: Console, stages: "Sequence[StageSummary]") -> None:
    """Print one line per stage: where it runs and what it holds."""
    total = sum(stage.num_params for stage in stages)
    count = f"{len(stages)} stage{'s' * (len(stages) > 1)}"
    table = Table(title=f"{count}, {total:,} parameters", title_justify="left")
    for name in ("rank", "stage"):
        table.add_column(name, justify="right")
    table.add_column("modules")
    for name in ("parameters", "share"):
        table.add_column(name, justify="right")
    for stage in sorted(stages, key=lambda stage: (stage.rank, stage.stage_index)):
        table.add_row(
            str(stage.rank),
            str(stage.stage_index),
            ", ".join(stage.folded_modules),
            f"{stage.num_params:,}",
            f"{stage.share:.1%}",
        )
    console.print(table)


def show_schedule(console: Console, options: TrainOptions, order: Order) -> None:
    """Print the schedule's bubble and its picture."""
    bubble = simulate(order).bubble_fraction
    console.print(
        f"\nSchedule {options.schedule}: {options.num_microbatches} microbatches of "
        f"{options.microbatch_size}; ranks idle {bubble:.1%} of a step (expected bubble)"
    )
    console.print(draw_text(order, width=console.width), markup=False, highlight=False)
    console.print()


@contextmanager
def reading_shown(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show how much of the first rank's weights is read: one bar for the job.

    The block gets a function to call with the bytes read so far and those to be read.
    """
    bar = Progress(
        TextColumn("weights"),
        BarColumn(),
        DownloadColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task("read", total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


class StepProgress:
    """One bar for all ranks; lines instead of a bar where the output is no terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("{task.fields[seconds]:.3f} s/step"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task(
            "train", total=steps, loss=float("nan"), speed=0.0, seconds=0.0
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar while the block runs."""
        with self._bar:
            yield

    def advance(self, step: int, loss: float, speed: float, seconds: float) -> None:
        """Tell what step `step`, counted from 1, brought."""
        self._bar.update(self._task, completed=step, loss=loss, speed=speed, seconds=seconds)
        every = max(1, self._steps // 10)
        if not self._console.is_terminal and (step == 1 or step % every == 0):
            self._console.print(
                f"step {step}/{self._steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
                f"{seconds:.3f} s/step",
                highlight=False,
            )


def show_result(
    console: Console, options: TrainOptions, first_loss: float, last_loss: float, sample: str | None
) -> None:
    """Print what came out of the run, and what to try next."""
    output = options.output
    console.print(f"\nLoss {first_loss:.3f} at the start, {last_loss:.3f} at the end.")
    console.print(f"Written to {output}/: schedule.png, metrics.jsonl, checkpoint/", markup=False)
    if sample is not None:
        console.print("\nA sample:")
        console.print(sample, style="italic", markup=False, highlight=False)
    again = "interleaved_1f1b" if options.schedule == "1f1b" else "1f1b"
    console.print(
        "\nTry next:\n"
        f"  autopipeline train --schedule {again}\n"
        f"  autopipeline train --model {output}/checkpoint --output {output}-2\n"
        "  autopipeline train --text FILE --steps 1000\n"
        f'  python: AutoModelForCausalLM.from_pretrained("{output}/checkpoint")',
        markup=False,
        highlight=False,
        soft_wrap=True,  # commands are to be copied
    )
