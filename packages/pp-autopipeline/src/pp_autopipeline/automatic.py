"""`pp_schedule="auto"`: the planner decides split, schedule and stages per rank of a model."""

from dataclasses import dataclass, replace

from torch import nn

from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.layer_counts import BalanceBy, estimated_costs
from pp_autopipeline.planning import ModelPlan, plan_model
from pp_schedule import Balance, Costs, Order, simulate
from pp_schedule.balancing import even_counts
from pp_schedule.orders import gpipe_order, one_f_one_b_order
from pp_split_hf import ModelLayout

_EFFORT = 0.2
_SPLIT_FACTOR = 1.1  # of a backward in halves; measured 1.02 to 1.5, with small layers the most


@dataclass(frozen=True)
class Chosen:
    """What the planner decided."""

    config: PipelineConfig
    """The config with a schedule and the modules of each stage in it."""
    order: Order | None
    """What to run, if it has no name."""
    balance: Balance
    """How even the ranks are."""
    schedule: str
    """Name of what runs; `own` for an order that has none."""


def choose_automatically(
    model: nn.Module,
    layout: ModelLayout,
    pp_size: int,
    config: PipelineConfig,
    by: BalanceBy,
) -> Chosen:
    """Plan within the memory that 1F1B takes with as many layers on every rank.

    Every rank decides alike; nothing is sent.

    Args:
        model: The whole model.
        layout: Of the model.
        pp_size: Pipeline ranks.
        config: Tells the microbatches; see `estimated_costs` for their length.
        by: Costs that were measured; anything else has them estimated.

    Raises:
        ValueError: If the costs are of another model or cannot be estimated.
    """
    costs = by if isinstance(by, Costs) else estimated_costs(model, layout, config)
    if not isinstance(by, Costs):
        costs = replace(costs, split_factor=_SPLIT_FACTOR)
    found = plan_model(
        model,
        pp_size,
        costs={config.pp_microbatch_size: costs},
        batch_size=config.pp_batch_size,
        memory_limit=memory_of_1f1b(costs, pp_size, config.num_microbatches),
        effort=_EFFORT,
        layout=layout,
    )
    return Chosen(
        replace(config, pp_schedule=_name(found), module_fqns_per_model_part=found.stage_fqns),
        found.plan.order if found.needs_csv else None,
        found.best.balance,
        found.best.schedule,
    )


def memory_of_1f1b(costs: Costs, pp_size: int, num_microbatches: int) -> float:
    """Return the bytes of the rank that needs most under 1F1B with an even split."""
    make = one_f_one_b_order if num_microbatches >= pp_size else gpipe_order
    stages = costs.for_stages(even_counts(len(costs.layers), pp_size))
    return max(simulate(make(pp_size, num_microbatches), stages).peak_memory)


def _name(found: ModelPlan) -> str:
    return (
        "1f1b" if found.needs_csv else found.best.schedule
    )  # the default, which an order overrides
