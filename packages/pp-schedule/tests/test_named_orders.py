from collections.abc import Callable
from typing import Any

import pytest

from pp_schedule import (
    SCHEDULE_NAMES,
    Action,
    Order,
    build_pipeline_schedule,
    named_order,
    resolve_schedule,
    schedule_order,
    stage_ids_this_rank,
)


def without_idle(order: Order) -> dict[int, list[Action]]:
    return {rank: [action for action in row if action] for rank, row in order.items()}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_it_is_the_order_that_torch_runs(name: str, fake_stages: Callable[..., list[Any]]) -> None:
    spec = resolve_schedule(name)
    tried = 0
    for pp_size, per_rank, m in [(1, 1, 2), (2, 1, 4), (2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 3, 9)]:
        num_stages = pp_size * per_rank
        if spec.check(pp_size, num_stages, m):
            continue
        tried += 1
        rank = pp_size - 1
        ids = stage_ids_this_rank(rank, pp_size, num_stages, spec.style)
        stages = fake_stages(rank, pp_size, ids, num_stages)
        built = build_pipeline_schedule(None, name, 1, m, stages, None)
        assert without_idle(named_order(name, pp_size, num_stages, m)) == without_idle(
            schedule_order(built)
        )
    assert tried >= 2


def test_sizes_against_the_rules_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"exactly 2 stages per rank.*needs 8 stages, not 4"):
        named_order("zbv", 4, 4, 8)
    with pytest.raises(ValueError, match="at least two microbatches per rank"):
        named_order("dualpipev", 4, 8, 4)
    with pytest.raises(ValueError, match="did you mean '1f1b'"):
        named_order("1f1bb", 4, 8, 4)
