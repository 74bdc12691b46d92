"""How many stages a pipeline has, and which rank runs which."""

from pp_autopipeline.config import PipelineConfig
from pp_schedule import ScheduleSpec, calculate_virtual_stages, stage_ids_this_rank
from pp_schedule.orders import Order
from pp_split_hf import ModelLayout


def count_stages(
    config: PipelineConfig,
    spec: ScheduleSpec | None,
    order: Order | None,
    layout: ModelLayout,
    pp_size: int,
    problems: list[str],
) -> int | None:
    """Return the number of stages; None, and the reason added to `problems`, if there is none."""
    parts = config.module_fqns_per_model_part
    if order is not None:
        stages = {a.stage_index for row in order.values() for a in row if a is not None}
        if parts is not None and len(parts) != len(stages):
            problems.append(
                f"module_fqns_per_model_part lists {len(parts)} stages and "
                f"pp_schedule_csv={config.pp_schedule_csv!r} runs {len(stages)}"
            )
        return len(stages) or None
    if parts is not None:
        return len(parts)
    assert spec is not None
    rounding = config.round_virtual_stages_to_pp_multiple
    try:
        return calculate_virtual_stages(
            layout.num_layers, config.layers_per_stage, pp_size, spec.single_stage, rounding
        )[0]
    except ValueError as error:
        problems.append(str(error))
        return None


def place_stages(
    spec: ScheduleSpec | None, order: Order | None, pp_size: int, num_stages: int
) -> dict[int, tuple[int, ...]]:
    """Return the stages of every pipeline rank, ascending if a file tells them."""
    if order is not None:
        return {
            rank: tuple(sorted({a.stage_index for a in row if a is not None}))
            for rank, row in order.items()
        }
    assert spec is not None
    return {
        rank: stage_ids_this_rank(rank, pp_size, num_stages, spec.style) for rank in range(pp_size)
    }
