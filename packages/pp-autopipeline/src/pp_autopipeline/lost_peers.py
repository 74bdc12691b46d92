"""An exchange between ranks that failed, told in the pipeline's terms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pp_autopipeline.pipeline import PipelinePlan


@contextmanager
def lost_peers_named(plan: PipelinePlan, group: dist.ProcessGroup) -> Iterator[None]:
    """Say who waited for whom where a connection breaks or a timeout passes; torch's text does not.

    Args:
        plan: Of the pipeline that runs in here.
        group: The pipeline's ranks.

    Raises:
        RuntimeError: In place of what torch raises when an exchange with another rank fails.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo's failures have no class of their own; their text begins with a file of gloo's.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RuntimeError(_explain(plan, group, str(error))) from error


def _explain(plan: PipelinePlan, group: dist.ProcessGroup, said: str) -> str:
    mine, rank_of_stage = plan.stage_ids[plan.pp_rank], plan.rank_of_stage
    near = {stage + step for stage in mine for step in (-1, 1)} - set(mine)
    neighbours = sorted(stage for stage in near if 0 <= stage < len(rank_of_stage))
    peers = ", ".join(
        f"rank {dist.get_global_rank(group, rank_of_stage[stage])} (stage {stage})"
        for stage in neighbours
    )
    exchanges = f"It exchanges tensors of the pipeline with {peers}.\n  " if peers else ""
    plural = "s" if len(mine) > 1 else ""
    return (
        f"rank {dist.get_rank()} (pipeline rank {plan.pp_rank} of {len(plan.stage_ids)}, "
        f"stage{plural} {', '.join(map(str, mine))}) lost another rank, or waited for one too "
        f"long:\n  {said}\n  {exchanges}"
        "The earliest error of all ranks has the cause. If all are like this one, the network "
        "between two hosts does not deliver, or a rank was slower than timeout_minutes of "
        "initialize_distributed and build_mesh"
    )
