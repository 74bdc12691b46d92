"""What `autopipeline train` takes, and everything that can be wrong with it.

Nothing here imports torch, so that a typing error is told within a second.
"""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pp_recipe.source import SMALL_MODEL, ModelSource, read_source
from pp_recipe.text import TextError, read_text
from pp_schedule import ScheduleSpec, calculate_virtual_stages, resolve_schedule


class OptionsError(ValueError):
    """The options cannot be run; `problems` holds one sentence per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class TrainOptions:
    """The options of one training run; `devices.settle_device` fills in device and ranks."""

    model: str | None = None
    """A folder or hub id of a Hugging Face causal LM; None for a new small model."""
    nproc_per_node: int | None = None
    """How many ranks this machine runs."""
    schedule: str = "1f1b"
    """The pipeline schedule, by any name that `pp_schedule.resolve_schedule` knows."""
    layers_per_stage: int | None = None
    """Decoder layers of a stage; None for one stage per rank, or two if the schedule interleaves."""
    microbatch_size: int = 1
    """Sequences that travel through the pipeline together."""
    batch_size: int = 8
    """Sequences of one optimizer step."""
    steps: int = 200
    """Optimizer steps."""
    seq_len: int = 128
    """Tokens of a sequence."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW; None for one that suits a new or a trained model."""
    seed: int = 0
    """Decides the new model's weights and which passages of the text are read."""
    text: str | None = None
    """A text file to train on; None for Python's own manual."""
    output: str = "autopipeline-output"
    """The folder that gets the picture, the metrics and the checkpoint."""
    checkpoint_every: int | None = None
    """Steps between checkpoints to resume from; None for none."""
    keep_last: int | None = 2
    """How many of those to keep."""
    resume: bool = False
    """Go on from the latest of those in `output`."""
    device: str | None = None
    """`"cpu"` or `"cuda"`; None for CUDA where there is any."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step."""
        return self.batch_size // self.microbatch_size

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline: torchrun's world if there is one, else those we start."""
        return int(os.environ.get("WORLD_SIZE", self.nproc_per_node or 2))

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate asked for, or what suits a new or a trained model."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-3 if self.model is None else 5e-5

    def to_json(self) -> str:
        """Write the options as JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrainOptions":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def check(self) -> None:
        """Refuse what cannot be run, before any process is started.

        Raises:
            OptionsError: With one sentence for each thing that is wrong.
        """
        problems = self._number_problems() + self._output_problems()
        source = SMALL_MODEL
        try:
            source = read_source(self.model)
        except ValueError as error:
            problems.append(f"--model {self.model}: {error}")
        else:
            problems += self._length_problems(source)
        try:
            spec = resolve_schedule(self.schedule)
        except ValueError as error:
            problems.append(f"--schedule: {error}")
        else:
            # Counting stages makes sense only with sound numbers and a known model.
            problems = problems or self._stage_problems(spec, source.num_layers)
        if problems:
            raise OptionsError(problems)

    def _number_problems(self) -> list[str]:
        problems = [
            f"{_flag(field.name)} {value} must be at least 1"
            for field in fields(self)
            if field.name not in ("seed", "resume")
            if isinstance(value := getattr(self, field.name), int) and value < 1
        ]
        if self.seed < 0:
            problems.append(f"--seed {self.seed} must be at least 0")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            problems.append(f"--learning-rate {self.learning_rate} must be above 0")
        sizes = self.batch_size >= 1 and self.microbatch_size >= 1
        if sizes and (rest := self.batch_size % self.microbatch_size):
            lower, size = self.batch_size - rest, self.microbatch_size
            near = f"{lower} or {lower + size}" if lower else str(size)
            problems.append(
                f"--batch-size {self.batch_size} does not divide by --microbatch-size {size}: "
                f"use a batch size of {near}"
            )
        return problems

    def _output_problems(self) -> list[str]:
        output = Path(self.output)
        checkpoint = output / "checkpoint"
        if output.exists() and not output.is_dir():
            return [f"--output {self.output} is a file: name a folder, or one to be made"]
        if checkpoint.exists() and not (checkpoint / "config.json").is_file():
            return [
                f"--output {self.output} holds a 'checkpoint' that is no Hugging Face checkpoint "
                "and would be replaced: name another folder"
            ]
        there = any(output.glob("checkpoints/step-*"))
        if there and self.checkpoint_every is not None and not self.resume:
            return [
                f"--output {self.output} has checkpoints of another run: give --resume to go on "
                "with it, or name another folder"
            ]
        if self.resume and not there:
            return [
                f"--resume: there is no checkpoint in {output / 'checkpoints'}; a run with "
                "--checkpoint-every N leaves some"
            ]
        # The one sure way to find out, on every file system and for root too.
        missing = [folder for folder in (output, *output.parents) if not folder.exists()]
        try:
            output.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=output).close()
        except OSError as error:
            return [f"--output {self.output} cannot be written: {error.strerror or error}"]
        finally:
            for folder in missing:  # nothing is left behind by a check
                with suppress(OSError):
                    folder.rmdir()
        return []

    def _length_problems(self, source: ModelSource) -> list[str]:
        problems = []
        if source.max_positions is not None and self.seq_len > source.max_positions:
            problems.append(
                f"--seq-len {self.seq_len} is longer than the {source.max_positions} positions of "
                f"--model {self.model}"
            )
        name = "the built-in text" if self.text is None else f"--text {self.text}"
        try:
            tokens = source.count_tokens(read_text(self.text), self.seq_len + 1)
        except TextError as error:
            return [*problems, f"{name} {error}"]
        if tokens <= self.seq_len:
            problems.append(
                f"{name} is too short: it has {tokens} tokens, and --seq-len {self.seq_len} "
                f"needs {self.seq_len + 1}; use a longer text or a --seq-len of at most "
                f"{max(1, tokens - 1)}"
            )
        return problems

    def _stage_problems(self, spec: ScheduleSpec, num_layers: int) -> list[str]:
        ranks = self.num_ranks
        if self.layers_per_stage is not None:
            fitting = self._fitting_layers_per_stage(spec, num_layers)
            if self.layers_per_stage not in fitting:
                # Of several sizes that make the same stages, the smallest is the true one.
                sizes = sorted(
                    {fitting[size]: size for size in sorted(fitting, reverse=True)}.values()
                )
                use = f"use {' or '.join(map(str, sizes))}, or " if sizes else ""
                return [
                    f"--layers-per-stage {self.layers_per_stage} does not deal {num_layers} layers "
                    f"out over {ranks} rank{'s' * (ranks > 1)} with --schedule {self.schedule}: "
                    f"{use}leave it out"
                ]
        num_stages, _ = calculate_virtual_stages(
            num_layers, self.layers_per_stage, ranks, spec.single_stage
        )
        if num_stages > num_layers:
            fitting_ranks = num_layers * ranks // num_stages
            remedy = (
                f"use at most --nproc-per-node {fitting_ranks}"
                if fitting_ranks
                else "use a schedule with one stage per rank, such as 1f1b"
            )
            return [
                f"--nproc-per-node {ranks} with --schedule {self.schedule} needs {num_stages} "
                f"stages, and the model has only {num_layers} layers: {remedy}"
            ]
        return [
            f"--batch-size {self.batch_size} in microbatches of {self.microbatch_size}: {problem}"
            for problem in spec.check(ranks, num_stages, self.num_microbatches)
        ]

    def _fitting_layers_per_stage(self, spec: ScheduleSpec, num_layers: int) -> dict[int, int]:
        """Return the values that suit the model, and how many stages each makes."""
        fitting = {}
        for layers in range(1, num_layers + 1):
            with suppress(ValueError):
                num_stages, stages_per_rank = calculate_virtual_stages(
                    num_layers, layers, self.num_ranks, spec.single_stage
                )
                if spec.stages_per_rank in (None, stages_per_rank):
                    fitting[layers] = num_stages
        return fitting


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
