"""The order of the schedule "auto": planned for stages that all cost the same. No torch."""

from pp_schedule.costs import Costs, LayerCosts
from pp_schedule.gc_pause import gc_pause
from pp_schedule.orders import Order
from pp_schedule.planner.search import Search
from pp_schedule.planner.splits import Placement

# What the halves of a backward and a message cost beside a forward, roughly, of a decoder's stage.
_STAGE = LayerCosts(1.0, 1.1, 0.8, activation_bytes=1.0)
_LATENCY = 0.03
_EFFORT = 0.2


def auto_order(pp_size: int, num_microbatches: int) -> Order:
    """Return the fastest order found for two equal stages per rank, placed as a V.

    It takes no more activations than 1F1B: those of `pp_size` microbatches on each rank. Any number
    of microbatches will do, and it is the same order wherever it is made.

    Args:
        pp_size: Number of ranks.
        num_microbatches: Microbatches per step.
    """
    costs = Costs([_STAGE] * (2 * pp_size), latency=_LATENCY)
    placement = Placement(pp_size, 2, "v")
    search = Search(costs, pp_size, num_microbatches, 2.0 * pp_size, [placement], _EFFORT)
    with gc_pause():
        named = search.named()
        drafts = [*named, *search.own(named)]
    fitting = [draft for draft in drafts if draft.needed_bytes <= search.memory_limit]
    return min(fitting, key=lambda draft: draft.step_time).order
