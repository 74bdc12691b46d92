"""What runs when in a pipeline: placement, schedules, pictures, gradients.

Names are imported on first use, so that the arithmetic (placement, orders, simulator, pictures)
costs no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_schedule.balancing import Balance, balance
    from pp_schedule.build import (
        build_order_schedule,
        build_pipeline_schedule,
        schedule_order,
    )
    from pp_schedule.costs import Costs, LayerCosts
    from pp_schedule.draw import chrome_trace, draw_html, draw_png, draw_text
    from pp_schedule.forward_only import build_forward_only_schedule
    from pp_schedule.gradients import clip_grad_norm, mark_shards, scale_grads_by_divisor
    from pp_schedule.interleaved_orders import interleaved_1f1b_order
    from pp_schedule.measured import measured_costs
    from pp_schedule.named_orders import named_order
    from pp_schedule.names import SCHEDULE_NAMES, ScheduleSpec, resolve_schedule
    from pp_schedule.orders import Action, Order, validate_order
    from pp_schedule.placement import calculate_virtual_stages, stage_ids_this_rank
    from pp_schedule.planner import Candidate, Plan, plan
    from pp_schedule.recorder import Recording, record
    from pp_schedule.schedule_csv import dump_csv, load_csv
    from pp_schedule.shapes import set_keyword_split, set_stage_shapes, use_stage_shapes
    from pp_schedule.simulator import Span, StageCosts, Timeline, Transfer, simulate, step_time
    from pp_schedule.v_orders import v_half_order, v_min_order
    from pp_schedule.zero_bubble_orders import zb_h1_order, zb_h2_order

_HOME = {
    "Action": "orders",
    "Balance": "balancing",
    "Candidate": "planner",
    "Costs": "costs",
    "LayerCosts": "costs",
    "Order": "orders",
    "Plan": "planner",
    "Recording": "recorder",
    "SCHEDULE_NAMES": "names",
    "ScheduleSpec": "names",
    "Span": "simulator",
    "StageCosts": "simulator",
    "Timeline": "simulator",
    "Transfer": "simulator",
    "balance": "balancing",
    "build_forward_only_schedule": "forward_only",
    "build_order_schedule": "build",
    "build_pipeline_schedule": "build",
    "calculate_virtual_stages": "placement",
    "chrome_trace": "draw",
    "clip_grad_norm": "gradients",
    "draw_html": "draw",
    "draw_png": "draw",
    "draw_text": "draw",
    "dump_csv": "schedule_csv",
    "interleaved_1f1b_order": "interleaved_orders",
    "load_csv": "schedule_csv",
    "mark_shards": "gradients",
    "measured_costs": "measured",
    "named_order": "named_orders",
    "plan": "planner",
    "record": "recorder",
    "resolve_schedule": "names",
    "scale_grads_by_divisor": "gradients",
    "schedule_order": "build",
    "set_keyword_split": "shapes",
    "set_stage_shapes": "shapes",
    "simulate": "simulator",
    "stage_ids_this_rank": "placement",
    "step_time": "simulator",
    "use_stage_shapes": "shapes",
    "v_half_order": "v_orders",
    "v_min_order": "v_orders",
    "validate_order": "orders",
    "zb_h1_order": "zero_bubble_orders",
    "zb_h2_order": "zero_bubble_orders",
}

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Balance",
    "Candidate",
    "Costs",
    "LayerCosts",
    "Order",
    "Plan",
    "Recording",
    "ScheduleSpec",
    "Span",
    "StageCosts",
    "Timeline",
    "Transfer",
    "balance",
    "build_forward_only_schedule",
    "build_order_schedule",
    "build_pipeline_schedule",
    "calculate_virtual_stages",
    "chrome_trace",
    "clip_grad_norm",
    "draw_html",
    "draw_png",
    "draw_text",
    "dump_csv",
    "interleaved_1f1b_order",
    "load_csv",
    "mark_shards",
    "measured_costs",
    "named_order",
    "plan",
    "record",
    "resolve_schedule",
    "scale_grads_by_divisor",
    "schedule_order",
    "set_keyword_split",
    "set_stage_shapes",
    "simulate",
    "stage_ids_this_rank",
    "step_time",
    "use_stage_shapes",
    "v_half_order",
    "v_min_order",
    "validate_order",
    "zb_h1_order",
    "zb_h2_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
