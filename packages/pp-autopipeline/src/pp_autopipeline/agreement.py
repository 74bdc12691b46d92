"""Whether all ranks of a pipeline were given the same pipeline."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pp_autopipeline.pipeline import BuiltPipeline
from pp_schedule import schedule_order


def pipeline_differences(
    pipeline: BuiltPipeline, settings: Mapping[str, Any], group: dist.ProcessGroup
) -> list[str]:
    """Return what differs between the ranks of a pipeline, the same list on all of them.

    Every rank calls it. Digests are sent.

    Args:
        pipeline: What this rank built.
        settings: What is to be the same beyond it, by names for messages.
        group: The pipeline's ranks.
    """
    plan = pipeline.plan
    orders = schedule_order(pipeline.schedule)
    mine = {
        "modules per stage": plan.stage_fqns,
        "stages per rank": plan.stage_ids,
        "schedule": {rank: [str(a) for a in row] for rank, row in orders.items()},
        "dtypes between stages": [
            [str(slot.shape.dtype) for slot in crossing.slots]
            for crossing in plan.layout.trace.crossings
        ],
        **settings,
    }
    digests = {
        name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in mine.items()
    }
    everyone: list[dict[str, str]] = [{} for _ in plan.stage_ids]
    if len(everyone) == 1:
        return []
    dist.all_gather_object(everyone, digests, group=group)
    return [
        f"{name} of pipeline ranks {', '.join(map(str, others))} differ from rank 0's"
        for name in digests
        if (others := [r for r, e in enumerate(everyone) if e[name] != everyone[0][name]])
    ]
