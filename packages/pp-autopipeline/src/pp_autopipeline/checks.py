"""What can be wrong with a pipeline's settings, in the names that the user typed."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pp_schedule import ScheduleSpec, resolve_schedule, validate_order
from pp_schedule.orders import Order

if TYPE_CHECKING:
    from pp_autopipeline.config import PipelineConfig

_MAX_SHOWN = 10
_warned: set[str] = set()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time it is given in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise if there are problems, all of them in one message.

    Raises:
        ValueError: `what`, and a line per problem; of very many the first ten and their number.
    """
    if not problems:
        return
    shown = list(problems[:_MAX_SHOWN])
    if len(problems) > _MAX_SHOWN:
        shown.append(f"and {len(problems) - _MAX_SHOWN} more")
    raise ValueError(f"{what}:\n  " + "\n  ".join(shown))


def field_problems(fields: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a config's fields, each by itself and against each other."""
    problems = [
        f"{name}={fields[name]!r} must be an integer of at least {least}{or_none}"
        for name, least, or_none in (
            ("pp_microbatch_size", 1, ""),
            ("pp_batch_size", 1, ""),
            ("pp_recv_buffer_pool_slack", 0, ""),
            ("layers_per_stage", 1, ", or None"),
            ("pp_seq_len", 1, ", or None"),
        )
        if not (or_none and fields[name] is None) and not _is_int(fields[name], least)
    ]
    batch_size, microbatch_size = fields["pp_batch_size"], fields["pp_microbatch_size"]
    sizes = _is_int(batch_size, 1) and _is_int(microbatch_size, 1)
    if sizes and batch_size % microbatch_size:
        lower = batch_size - batch_size % microbatch_size
        near = f"{lower} or " if lower else ""
        problems.append(
            f"pp_batch_size={batch_size} is not a multiple of pp_microbatch_size="
            f"{microbatch_size}; use pp_batch_size={near}{lower + microbatch_size}"
        )
    if fields["dtype"] is not None and not isinstance(fields["dtype"], torch.dtype):
        problems.append(f"dtype={fields['dtype']!r} is no torch.dtype; use torch.bfloat16 or such")
    if fields["loss_fn"] is not None and not callable(fields["loss_fn"]):
        problems.append(f"loss_fn={fields['loss_fn']!r} cannot be called")
    return problems + _schedule_field_problems(fields) + _split_problems(fields)


def _schedule_field_problems(fields: Mapping[str, Any]) -> list[str]:
    schedule, csv = fields["pp_schedule"], fields["pp_schedule_csv"]
    if schedule is None:
        return [] if csv else ["pp_schedule and pp_schedule_csv are both None: give one of them"]
    try:
        resolve_schedule(schedule)
    except (ValueError, TypeError) as error:
        return [f"pp_schedule: {error}"]
    return []


def _split_problems(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    rounding = fields["round_virtual_stages_to_pp_multiple"]
    parts, layers = fields["module_fqns_per_model_part"], fields["layers_per_stage"]
    if rounding not in (None, "up", "down"):
        problems.append(
            f"round_virtual_stages_to_pp_multiple={rounding!r} is none of 'up', 'down', None"
        )
    if parts is not None and any(isinstance(part, str) for part in parts):
        problems.append(
            "module_fqns_per_model_part lists names where it should list stages: it is a list of "
            "stages, each a list of names"
        )
    for name in ("module_fqns_per_model_part", "pp_schedule_csv"):
        if layers is not None and fields[name] is not None:
            problems.append(
                f"layers_per_stage={layers} contradicts {name}, which says how many stages there "
                "are: give one of them"
            )
    return problems


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def mesh_problems(mesh: DeviceMesh, mesh_name: str, axes: Mapping[str, str | None]) -> list[str]:
    """Return which of the axes that the user named a mesh does not have."""
    names = mesh.mesh_dim_names or ()
    problems = []
    for argument, axis in axes.items():
        if axis is not None and axis not in names:
            try:  # a flattened axis is not among the names
                mesh[axis]
            except (KeyError, RuntimeError, ValueError):
                problems.append(f"{argument}={axis!r}: {mesh_name} has the axes {names} only")
    return problems


def order_problems(order: Order, path: str, pp_size: int, num_microbatches: int) -> list[str]:
    """Return what keeps the order in a CSV from running."""
    stages = {action.stage_index for row in order.values() for action in row if action is not None}
    if not stages:
        return [f"pp_schedule_csv={path!r} has no actions"]
    problems = validate_order(order, 1 + max(stages), num_microbatches)
    if len(order) != pp_size:
        problems.insert(0, f"it has {len(order)} rows for {pp_size} pipeline ranks")
    return [f"pp_schedule_csv={path!r}: {problem}" for problem in problems]


def schedule_problems(
    spec: ScheduleSpec, pp_size: int, num_stages: int, config: "PipelineConfig"
) -> list[str]:
    """Return what keeps a named schedule from running these stages and microbatches."""
    num_microbatches = config.num_microbatches
    problems = [
        f"pp_schedule={config.pp_schedule!r}: {problem}"
        for problem in spec.check(pp_size, num_stages, num_microbatches)
    ]
    if problems and config.module_fqns_per_model_part is not None:
        problems.append(f"module_fqns_per_model_part lists {num_stages} stages")
    elif problems and config.layers_per_stage is not None:
        problems.append(f"layers_per_stage={config.layers_per_stage} makes {num_stages} stages")
    if not spec.takes(pp_size, num_stages, num_microbatches):
        batch = "pp_batch_size", config.pp_batch_size
        microbatch = "pp_microbatch_size", config.pp_microbatch_size
        sizes = spec.fitting_sizes(pp_size, num_stages, batch, microbatch)
        default = " (pp_batch_size is 1 unless given)" if config.pp_batch_size == 1 else ""
        problems.append(sizes + default)
    return problems
