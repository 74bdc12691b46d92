"""What can be wrong with a pipeline's settings, in the names that the user typed."""

import logging
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from pp_schedule import ScheduleSpec, calculate_virtual_stages, validate_order
from pp_schedule.orders import Order

_warned: set[str] = set()


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time it is given in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def shape_problems(microbatch_size: int, batch_size: int, seq_len: int | None) -> list[str]:
    """Return what is wrong with the sizes of batch, microbatch and sequence."""
    problems = [
        f"{name}={value!r} must be an integer of at least 1"
        for name, value in (("pp_microbatch_size", microbatch_size), ("pp_batch_size", batch_size))
        if not isinstance(value, int) or value < 1
    ]
    if not problems and batch_size % microbatch_size:
        lower = batch_size - batch_size % microbatch_size
        near = f"{lower} or " if lower else ""
        problems.append(
            f"pp_batch_size={batch_size} is not a multiple of pp_microbatch_size="
            f"{microbatch_size}; use pp_batch_size={near}{lower + microbatch_size}"
        )
    if seq_len is not None and seq_len < 1:
        problems.append(f"pp_seq_len={seq_len} must be at least 1, or None")
    return problems


def pool_problems(slack: int) -> list[str]:
    """Return what is wrong with the buffer pool's settings."""
    if isinstance(slack, int) and slack >= 0:
        return []
    return [f"pp_recv_buffer_pool_slack={slack!r} must be an integer of at least 0"]


def mesh_problems(mesh: DeviceMesh, axis_names: dict[str, str | None]) -> list[str]:
    """Return which of the axes that the user named the mesh does not have."""
    names = mesh.mesh_dim_names or ()
    problems = []
    for argument, axis in axis_names.items():
        if axis is not None and axis not in names:
            try:  # a flattened axis is not among the names
                mesh[axis]
            except (KeyError, RuntimeError, ValueError):
                problems.append(f"{argument}={axis!r}: world_mesh has the axes {names} only")
    return problems


def plan_num_stages(
    spec: ScheduleSpec | None,
    order: Order | None,
    num_layers: int,
    pp_size: int,
    layers_per_stage: int | None,
    round_to_pp_multiple: str | None,
    stage_fqns: Sequence[Sequence[str]] | None,
) -> int:
    """Return the number of stages of the pipeline.

    Raises:
        ValueError: If the settings allow none.
    """
    if stage_fqns is not None:
        return len(stage_fqns)
    if order is not None:
        return 1 + max(a.stage_index for row in order.values() for a in row if a is not None)
    assert spec is not None
    return calculate_virtual_stages(
        num_layers, layers_per_stage, pp_size, spec.single_stage, round_to_pp_multiple
    )[0]


def schedule_problems(
    spec: ScheduleSpec | None,
    order: Order | None,
    pp_size: int,
    num_stages: int,
    batch_size: int,
    microbatch_size: int,
    stage_fqns: Sequence[Sequence[str]] | None,
) -> list[str]:
    """Return what keeps the schedule from running these stages and microbatches."""
    num_microbatches = batch_size // microbatch_size
    if order is not None:
        problems = validate_order(order, num_stages, num_microbatches)
        if len(order) != pp_size:
            problems.append(f"the schedule has {len(order)} rows for {pp_size} ranks")
        return problems
    assert spec is not None
    problems = spec.check(pp_size, num_stages, num_microbatches)
    if problems and stage_fqns is not None:
        problems.append(f"(module_fqns_per_model_part lists {len(stage_fqns)} stages)")
    if not spec.takes(pp_size, num_stages, num_microbatches):
        problems.append(
            f"(microbatches are pp_batch_size / pp_microbatch_size = {batch_size} / "
            f"{microbatch_size}; pp_batch_size is 1 unless given)"
        )
    return problems
