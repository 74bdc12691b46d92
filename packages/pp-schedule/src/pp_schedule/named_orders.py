"""The order of any schedule that has a name, from sizes alone: no stages, no process group."""

from collections.abc import Callable, Mapping
from importlib import import_module

from pp_schedule.interleaved_orders import interleaved_1f1b_order
from pp_schedule.names import ScheduleSpec, resolve_schedule
from pp_schedule.orders import (
    Order,
    gpipe_order,
    one_f_one_b_order,
)
from pp_schedule.placement import stage_ids_this_rank
from pp_schedule.v_orders import v_half_order, v_min_order
from pp_schedule.zero_bubble_orders import zb_h1_order, zb_h2_order

OWN_ORDERS: Mapping[str, tuple[int, Callable[[int, int], Order]]] = {
    "zb_h1": (1, zb_h1_order),
    "zb_h2": (1, zb_h2_order),
    "v_half": (2, v_half_order),
    "v_min": (2, v_min_order),
}
"""Orders that torch has no class for, with their stages per rank; two are placed as a V."""


def named_order(
    schedule: str | ScheduleSpec, pp_size: int, num_stages: int, num_microbatches: int
) -> Order:
    """Return the order that torch runs for a schedule.

    Args:
        schedule: A name that `resolve_schedule` knows, or what it returned.
        pp_size: Number of ranks.
        num_stages: Number of stages of the whole pipeline.
        num_microbatches: Microbatches per step.

    Raises:
        ValueError: If the sizes break the schedule's rules; all that is wrong is named.
    """
    spec = resolve_schedule(schedule) if isinstance(schedule, str) else schedule
    problems = spec.check(pp_size, num_stages, num_microbatches)
    if problems:
        raise ValueError(f"schedule {spec.name!r} has no order here: " + "; ".join(problems))
    if spec.name == "gpipe":
        return gpipe_order(num_stages, num_microbatches)
    if spec.name == "1f1b":
        return one_f_one_b_order(num_stages, num_microbatches)
    if spec.name == "interleaved1f1b":
        return interleaved_1f1b_order(pp_size, num_stages // pp_size, num_microbatches)
    if spec.name == "auto":
        # On first use: the planner itself asks for the order of every other name.
        auto_order: Callable[[int, int], Order] = import_module(
            "pp_schedule.planner.auto"
        ).auto_order
        return auto_order(pp_size, num_microbatches)
    # The others are torch's own; on first use, as it imports torch.
    torch_private = import_module("pp_schedule.torch_private")
    order: Order = torch_private.order_of_class(
        spec.cls,
        stage_ids_this_rank(0, pp_size, num_stages, spec.style),
        pp_size,
        num_stages,
        num_microbatches,
    )
    return order
