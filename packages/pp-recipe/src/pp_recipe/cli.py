"""The `autopipeline` command."""

import os
import signal
import sys
from typing import Any, NoReturn

import click

from pp_recipe.options import OptionsError, TrainOptions

_DEFAULTS = TrainOptions()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pp-recipe")
def cli() -> None:
    """Pipeline-parallel training of Hugging Face models."""


@cli.command(context_settings={"show_default": True})
@click.option(
    "--model",
    metavar="FOLDER_OR_ID",
    help="A Hugging Face causal language model to train on: a local folder, or an id of the hub. "
    "Without it a new small Llama-style model is trained, with bytes as tokens.",
)
@click.option(
    "--nproc-per-node",
    type=int,
    help="Ranks to start on this machine.  [default: 2, or the GPUs if there is but one]",
)
@click.option("--schedule", default=_DEFAULTS.schedule, help="The pipeline schedule.")
@click.option(
    "--layers-per-stage",
    type=int,
    help="Decoder layers of a stage.  [default: one stage per rank, two if interleaved]",
)
@click.option(
    "--microbatch-size", default=_DEFAULTS.microbatch_size, help="Sequences of a microbatch."
)
@click.option("--batch-size", default=_DEFAULTS.batch_size, help="Sequences of a step.")
@click.option("--steps", default=_DEFAULTS.steps, help="Optimizer steps.")
@click.option("--seq-len", default=_DEFAULTS.seq_len, help="Tokens of a sequence.")
@click.option(
    "--learning-rate",
    type=float,
    help="Peak learning rate.  [default: 0.005 for the new model, 0.00005 with --model]",
)
@click.option("--seed", default=_DEFAULTS.seed, help="Seed of weights and batches.")
@click.option(
    "--text", metavar="FILE", help="Text to train on, in UTF-8.  [default: Python's own manual]"
)
@click.option("--output", default=_DEFAULTS.output, metavar="FOLDER", help="Where to write.")
@click.option(
    "--checkpoint-every",
    type=int,
    help="Steps between checkpoints to resume from, in OUTPUT/checkpoints.  [default: none]",
)
@click.option("--keep-last", default=_DEFAULTS.keep_last, help="How many of those to keep.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the latest checkpoint in OUTPUT; ranks and schedule may be others.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there is any]"
)
def train(**values: Any) -> None:
    """Train a causal language model, its layers dealt out over several processes.

    Without options: a small model, two processes on the CPU, about a minute, no network. Under
    torchrun the command is one of its processes and starts none.
    """
    try:
        _train(TrainOptions(**values))
    except OptionsError as error:
        _refuse(error)


@cli.command()
@click.argument("model")
@click.option(
    "--stages", type=click.IntRange(2), help="Try splits into so many stages too, 20 at most."
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="Layers of the tiny copy.  [default: as few as show every kind of layer]",
)
@click.option("--full-size", is_flag=True, help="Take the config as it is, not a tiny copy of it.")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the model brings.")
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE_OR_FILE",
    help="Import this first: a module, or a .py file, that registers its own architecture.",
)
def verify(**values: Any) -> None:
    """Compare MODEL with its pipeline stages: is every cut exact?

    MODEL is a folder with a config.json, a model type such as qwen3_moe, or a hub id that is in the
    local cache. No weights are read: a tiny random copy of the model runs whole and in stages, in
    this process. Exit code 0: all exact; 1: not; 2: no such model, or it cannot be cut.
    """
    if values["full_size"] and values["layers"] is not None:
        raise click.UsageError("--layers is for the tiny copy: leave out it or --full-size")
    try:
        exact = _verify(values)
    except OptionsError as error:
        _refuse(error)
    sys.exit(0 if exact else 1)


@cli.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--pp", type=click.IntRange(1), required=True, help="Pipeline ranks.")
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Rows of a step.")
@click.option("--seq-len", type=click.IntRange(1), required=True, help="Tokens of a row.")
@click.option("--gpu", help="What a rank runs on: a100, h100, h200, b200, l40s, mi300x, ...")
@click.option("--memory", metavar="SIZE", help="Memory of a rank, as 80GB.  [default: the GPU's]")
@click.option("--flops", type=float, help="Peak FLOPs per second.  [default: the GPU's]")
@click.option("--efficiency", default=0.45, help="Share of the peak that is reached.")
@click.option("--bandwidth", type=float, help="GB/s to the next rank.  [default: the GPU's]")
@click.option("--latency", default=20.0, help="Microseconds of a message besides its bytes.")
@click.option("--overhead", default=100.0, help="Microseconds of an action besides its work.")
@click.option(
    "--split-factor", default=1.1, help="Time of a backward in two halves over a whole one's."
)
@click.option("--dtype", default="bfloat16", help="Dtype of parameters.")
@click.option(
    "--optimizer-bytes",
    type=float,
    help="Bytes of optimizer's state per parameter.  [default: AdamW's in the dtype]",
)
@click.option(
    "--microbatch-size", type=click.IntRange(1), help="Rows of a microbatch.  [default: the best]"
)
@click.option("--max-stages-per-rank", default=2, help="Stages of a rank, at most.")
@click.option("--effort", default=1.0, help="How much to try; 2 takes about twice as long.")
@click.option("--costs", metavar="FILE", help="Measured costs of a row, as measure_costs has them.")
@click.option("--output", default="plan", metavar="FOLDER", help="Where to write.")
@click.option("--trust-remote-code", is_flag=True, help="Run the code that the model brings.")
@click.option("--import", "imports", multiple=True, metavar="MODULE_OR_FILE", help="Import first.")
def plan(**values: Any) -> None:
    """Find the split, schedule and microbatch size to train MODEL with, before renting a GPU.

    MODEL is a folder with a config.json, a model type such as qwen3_moe, or a hub id that is in the
    local cache. No weights are read. Work is counted from shapes, and every schedule is simulated;
    what is best is written as settings and a schedule file. Exit code 0: it fits the memory; 1:
    nothing does, and this is the nearest; 2: a wrong option, or no such model.
    """
    try:
        fits = _plan(values)
    except OptionsError as error:
        _refuse(error)
    sys.exit(0 if fits else 1)


def _plan(values: dict[str, Any]) -> bool:
    from transformers.utils import logging

    from pp_recipe.plan import PlanOptions, plan

    logging.set_verbosity_error()
    return plan(PlanOptions(**values), click.echo)


def _verify(values: dict[str, Any]) -> bool:
    from transformers.utils import logging

    from pp_recipe.verify import VerifyOptions, verify

    logging.set_verbosity_error()  # about token ids and the like, which a tiny copy has otherwise
    return verify(VerifyOptions(**values), click.echo)


def _refuse(error: OptionsError) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        for problem in error.problems:
            click.echo(f"Error: {problem}", err=True)
    sys.exit(2)


def _train(options: TrainOptions) -> None:
    from pp_recipe.devices import settle_device

    options.check()
    options = settle_device(options)
    options.check()  # The number of ranks may have changed.
    if "RANK" in os.environ:
        from pp_recipe.train import train

        train(options)
    else:
        _launch(options)


def _launch(options: TrainOptions) -> None:
    from pp_recipe.launch import InterruptedRunError, RankFailedError, launch

    count = options.nproc_per_node or 1
    click.echo(f"Starting {count} rank{'s' * (count > 1)} on {options.device} ...")
    try:
        launch(options)
    except InterruptedRunError:
        if sys.stdout.isatty():
            click.echo("\x1b[?25h", nl=False)  # The bar had hidden the cursor.
        click.echo("Interrupted: all ranks have ended.", err=True)
        sys.exit(128 + signal.SIGINT)
    except RankFailedError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


def main() -> None:
    """Run the command; the console script."""
    # Until ranks run, Ctrl-C just ends the process: importing torch takes seconds, and an
    # interrupt inside it would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli()
