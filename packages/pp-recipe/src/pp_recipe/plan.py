"""Which split, schedule and microbatch size a model would train best with, without a GPU at hand."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pp_autopipeline import Costs, estimate_costs, init_empty_weights
from pp_autopipeline.planning import ModelPlan, plan_model
from pp_recipe.gpus import find_gpu
from pp_recipe.options import OptionsError
from pp_recipe.resolve import construct, import_user_code, reason, resolve_config
from pp_schedule import draw_html
from pp_split_hf import ModelLayout, check_config_support, check_pipeline_support, find_layout

Say = Callable[[str], None]
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


@dataclass(frozen=True)
class PlanOptions:
    """The options of `autopipeline plan`."""

    model: str
    """A folder with a config.json, a model type, or a hub id in the cache."""
    pp: int
    """Pipeline ranks."""
    batch_size: int
    """Rows per step and pipeline."""
    seq_len: int
    """Tokens per row."""
    gpu: str | None = None
    """A name of `GPUS`; None if costs or figures are given."""
    memory: str | None = None
    """Bytes per rank, such as 80GB; None takes the GPU's."""
    flops: float | None = None
    """Peak FLOPs per second; None takes the GPU's."""
    efficiency: float = 0.45
    """Share of the peak that is reached."""
    bandwidth: float | None = None
    """GB per second between neighbours, in one direction; None takes the GPU's."""
    latency: float = 20.0
    """Microseconds of a message besides its bytes."""
    overhead: float = 100.0
    """Microseconds of every action besides its work."""
    split_factor: float = 1.1
    """Time of a backward in two halves over that of a whole one."""
    dtype: str = "bfloat16"
    """Dtype of parameters."""
    optimizer_bytes: float | None = None
    """Bytes of optimizer's state per parameter; None means AdamW's in the parameters' dtype."""
    microbatch_size: int | None = None
    """Rows per microbatch; None searches for it."""
    max_stages_per_rank: int = 2
    """Stages of a rank, at most."""
    effort: float = 1.0
    """How much to try."""
    costs: str | None = None
    """A file of costs in seconds, for one row, in place of estimated ones."""
    output: str = "plan"
    """Folder to write to."""
    trust_remote_code: bool = False
    """Run the code that the folder brings."""
    imports: tuple[str, ...] = ()
    """Modules or files to import first."""


def plan(options: PlanOptions, say: Say) -> bool:
    """Plan, write what was found, and return whether it fits.

    Args:
        options: What to plan for.
        say: Called with each line of the report.

    Raises:
        OptionsError: If an option is wrong, or the model cannot be pipelined.
    """
    memory = _memory(options)
    for name in options.imports:
        import_user_code(name)
    config = resolve_config(options.model, options.trust_remote_code)
    if problems := check_config_support(config):
        raise OptionsError(problems)
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionsError([f"--dtype {options.dtype} is no dtype such as bfloat16 or float32"])
    with init_empty_weights():
        model = construct(config, options.trust_remote_code)
    if problems := check_pipeline_support(model):
        raise OptionsError(problems)
    layout = find_layout(model, dtype)
    costs = _costs(model, layout, dtype, options)
    try:
        found = plan_model(
            model,
            options.pp,
            costs=costs,
            batch_size=options.batch_size,
            memory_limit=memory,
            microbatch_size=options.microbatch_size,
            max_stages_per_rank=options.max_stages_per_rank,
            effort=options.effort,
            layout=layout,
        )
    except ValueError as error:
        raise OptionsError([str(error)]) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{type(model).__name__}: {layout.num_layers} layers, {count / 1e9:.2f} billion "
        f"parameters, {options.pp} ranks of {memory / 1e9:.0f} GB, batches of "
        f"{options.batch_size} x {options.seq_len} tokens"
    )
    say(str(found.plan))
    for line in _write(found, costs, Path(options.output)):
        say(line)
    return found.best.fits


def _memory(options: PlanOptions) -> float:
    """Return the bytes of a rank, having checked the figures of the GPU."""
    problems = [
        f"{name} {value} must be above 0"
        for name, value in (
            ("--pp", options.pp),
            ("--batch-size", options.batch_size),
            ("--seq-len", options.seq_len),
            ("--efficiency", options.efficiency),
            ("--flops", options.flops),
            ("--bandwidth", options.bandwidth),
            ("--split-factor", options.split_factor),
        )
        if value is not None and not value > 0
    ]
    if options.gpu is None and options.flops is None and options.costs is None:
        problems.append("say how fast a rank is: --gpu, --flops or --costs")
    if options.gpu is None and options.memory is None:
        problems.append("say how much memory a rank has: --gpu or --memory")
    memory = None
    if options.memory is not None:
        match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", options.memory.strip(), re.IGNORECASE)
        unit = _UNITS.get(match[2].upper()) if match else None
        try:
            memory = float(match[1]) * unit if match and unit else None
        except ValueError:
            memory = None
        if not memory:
            problems.append(f"--memory {options.memory} is no size such as 80GB or 74.5GiB")
    if problems:
        raise OptionsError(problems)
    if memory is not None:
        return memory
    assert options.gpu is not None
    return find_gpu(options.gpu).memory


def _costs(
    model: PreTrainedModel, layout: ModelLayout, dtype: torch.dtype, options: PlanOptions
) -> Costs:
    """Return what one row costs, in seconds."""
    if options.costs is not None:
        try:
            return Costs.from_json(options.costs)
        except (OSError, ValueError) as error:
            raise OptionsError([f"--costs {options.costs}: {error}"]) from error
    gpu = find_gpu(options.gpu) if options.gpu is not None else None
    flops = options.flops or (gpu.flops if gpu else 0.0)
    try:
        costs = estimate_costs(
            model,
            seq_len=options.seq_len,
            layout=layout,
            dtype=dtype,
            optimizer_bytes_per_parameter=options.optimizer_bytes,
        )
    except (ValueError, RuntimeError) as error:
        raise OptionsError([reason(error)]) from error
    seconds = costs.in_seconds(flops * options.efficiency)
    bandwidth = options.bandwidth * 1e9 if options.bandwidth else gpu.bandwidth if gpu else None
    return replace(
        seconds,
        latency=options.latency * 1e-6,
        overhead=options.overhead * 1e-6,
        split_factor=options.split_factor,
        bandwidth=bandwidth or float("inf"),
    )


def _write(found: ModelPlan, costs: Costs, folder: Path) -> list[str]:
    """Write the order, the settings, the costs and a picture; return what to say of them."""
    folder.mkdir(parents=True, exist_ok=True)
    csv, config = folder / "schedule.csv", folder / "pipeline.yaml"
    found.plan.dump_csv(csv)
    costs.to_json(folder / "costs.json")
    draw_html(
        found.best.timeline, folder / "schedule.html", title=str(found.best.schedule), unit="s"
    )
    settings = found.settings(csv)
    stages = settings.pop("module_fqns_per_model_part")
    # JSON values are YAML too.
    lines = [f"{name}: {json.dumps(value)}" for name, value in settings.items()]
    lines += ["module_fqns_per_model_part:", *(f"  - {json.dumps(stage)}" for stage in stages)]
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    heading = f"Settings for AutoPipeline and PipelineConfig, also in {config}:"
    shown = lines if len(lines) <= 40 else [*lines[:8], f"  ... {len(lines) - 8} more lines"]
    return [
        "",
        heading,
        *(line if len(line) <= 160 else line[:157] + "..." for line in shown),
        f"The order: {csv}; a picture of it: {folder / 'schedule.html'}; costs: "
        f"{folder / 'costs.json'}",
    ]
