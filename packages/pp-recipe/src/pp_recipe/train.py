"""What each rank does: build its stages, train, save. Read it top to bottom."""

import math
import os
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pp_autopipeline import AutoPipeline, Checkpoints
from pp_mesh import DistInfo, ParallelSizes, build_mesh, destroy_distributed, initialize_distributed
from pp_recipe.display import (
    StepProgress,
    reading_shown,
    show_result,
    show_schedule,
    show_stages,
)
from pp_recipe.metrics import Metrics
from pp_recipe.model import build_model
from pp_recipe.options import OptionsError, TrainOptions
from pp_recipe.sample import write_sample
from pp_recipe.text import draw_batch, read_text
from pp_schedule import clip_grad_norm

WARMUP_STEPS = 20
MAX_GRAD_NORM = 1.0


def train(options: TrainOptions) -> None:
    """Train as one rank of the pipeline; torchrun's variables say which."""
    info = initialize_distributed("gloo" if options.device == "cpu" else None, timeout_minutes=10)
    _share_cores(info)
    disable_progress_bar()  # One bar is enough, and it is ours.
    console = Console(quiet=not info.is_main)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)

    model, tokenizer = build_model(options)
    try:
        pipeline = build_pipeline(options, model, info)
        fill_pipeline(options, pipeline, console)
    except ValueError as error:  # This model cannot be cut or read like this; the message says all.
        raise OptionsError([str(error)]) from error
    show_stages(console, pipeline.stage_summaries)
    show_schedule(console, options, pipeline.schedule_order)
    if info.is_main:
        pipeline.visualize_current_schedule(output / "schedule.png")

    ids = tokenizer(read_text(options.text), add_special_tokens=False, verbose=False)["input_ids"]
    losses = run_steps(options, pipeline, torch.tensor(ids), console, output)

    checkpoint = output / "checkpoint"
    pipeline.save_pretrained(checkpoint, tokenizer=tokenizer)
    destroy_distributed()
    if info.is_main:
        # Of a model of someone's own no process here may have room for the whole.
        sample = write_sample(checkpoint) if options.model is None else None
        show_result(console, options, losses[0], fmean(losses[-10:]), sample)


def build_pipeline(options: TrainOptions, model: PreTrainedModel, info: DistInfo) -> AutoPipeline:
    """Cut the model into stages; this rank keeps its own, on its device."""
    sizes = ParallelSizes(pp_size=info.world_size)
    return AutoPipeline(
        world_mesh=build_mesh(sizes, device_type=info.device.type).world_mesh,
        pp_schedule=options.schedule,
        pp_microbatch_size=options.microbatch_size,
        pp_batch_size=options.batch_size,
        layers_per_stage=options.layers_per_stage,
        device=info.device,
    ).build(model, loss_fn=next_token_loss)


def fill_pipeline(options: TrainOptions, pipeline: AutoPipeline, console: Console) -> None:
    """Make the weights of this rank's stages, or read them: those and no others.

    Where training is resumed they are read later, with all the rest.
    """
    if options.resume:
        pipeline.materialize(values=False)
    elif options.model is None:
        pipeline.materialize(seed=options.seed)
    else:
        with reading_shown(console) as progress:
            pipeline.load_pretrained(options.model, progress=progress)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy; the labels are the ids one token further on."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def run_steps(
    options: TrainOptions, pipeline: AutoPipeline, tokens: Tensor, console: Console, output: Path
) -> list[float]:
    """Train, with one line of JSON per step, and return the loss of each step."""
    device = pipeline.device
    parameters = [p for p in pipeline.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.peak_learning_rate)
    learning_rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    losses = []
    progress = StepProgress(console, options.steps)
    with Checkpoints(output / "checkpoints", options.keep_last) as checkpoints:
        done = 0
        if options.resume:
            done = checkpoints.load(pipeline, optimizer, learning_rate).step
            if done >= options.steps:
                raise OptionsError([f"--steps {options.steps}: the checkpoint has {done} already"])
        log = Metrics(None if console.quiet else output / "metrics.jsonl", done)
        with closing(log), progress.shown():
            for step in range(done + 1, options.steps + 1):
                started = time.perf_counter()
                # Every rank draws the same batch: the first stage reads the ids, the last the
                # labels.
                input_ids, labels = draw_batch(
                    tokens, options.batch_size, options.seq_len, options.seed, step
                )
                out = pipeline.step(input_ids.to(device), target=labels.to(device))
                norm = clip_grad_norm(MAX_GRAD_NORM, pipeline.parts)
                optimizer.step()
                optimizer.zero_grad()
                assert out.loss is not None  # There is a target, so there is a loss.
                losses.append(float(out.loss))
                seconds = time.perf_counter() - started

                speed = labels.numel() / seconds
                log.write(
                    step, losses[-1], float(learning_rate.get_last_lr()[0]), norm, speed, seconds
                )
                progress.advance(step, losses[-1], speed, seconds)
                learning_rate.step()
                if options.checkpoint_every and step % options.checkpoint_every == 0:
                    checkpoints.save(step, pipeline, optimizer, learning_rate, asynchronous=True)
    return losses


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up linearly, then fall to a tenth along a cosine; `step` counts from 0."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _share_cores(info: DistInfo) -> None:
    """Give each rank of this machine its share of the cores."""
    if info.device.type == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", info.world_size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
