"""What runs when in a pipeline: placement, schedules, pictures, gradients.

Names are imported on first use, so that the arithmetic (placement, orders, simulator, pictures)
costs no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_schedule.build import build_pipeline_schedule, schedule_order
    from pp_schedule.draw import draw_png, draw_text
    from pp_schedule.forward_only import build_forward_only_schedule
    from pp_schedule.gradients import clip_grad_norm, scale_grads_by_divisor
    from pp_schedule.names import SCHEDULE_NAMES, ScheduleSpec, resolve_schedule
    from pp_schedule.orders import Action, Order, dump_csv, load_csv, validate_order
    from pp_schedule.placement import calculate_virtual_stages, stage_ids_this_rank
    from pp_schedule.shapes import set_keyword_split, set_stage_shapes, use_stage_shapes
    from pp_schedule.simulator import Costs, Span, Timeline, simulate

_HOME = {
    "Action": "orders",
    "Costs": "simulator",
    "Order": "orders",
    "SCHEDULE_NAMES": "names",
    "ScheduleSpec": "names",
    "Span": "simulator",
    "Timeline": "simulator",
    "build_forward_only_schedule": "forward_only",
    "build_pipeline_schedule": "build",
    "calculate_virtual_stages": "placement",
    "clip_grad_norm": "gradients",
    "draw_png": "draw",
    "draw_text": "draw",
    "dump_csv": "orders",
    "load_csv": "orders",
    "resolve_schedule": "names",
    "scale_grads_by_divisor": "gradients",
    "schedule_order": "build",
    "set_keyword_split": "shapes",
    "set_stage_shapes": "shapes",
    "simulate": "simulator",
    "stage_ids_this_rank": "placement",
    "use_stage_shapes": "shapes",
    "validate_order": "orders",
}

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Costs",
    "Order",
    "ScheduleSpec",
    "Span",
    "Timeline",
    "build_forward_only_schedule",
    "build_pipeline_schedule",
    "calculate_virtual_stages",
    "clip_grad_norm",
    "draw_png",
    "draw_text",
    "dump_csv",
    "load_csv",
    "resolve_schedule",
    "scale_grads_by_divisor",
    "schedule_order",
    "set_keyword_split",
    "set_stage_shapes",
    "simulate",
    "stage_ids_this_rank",
    "use_stage_shapes",
    "validate_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
