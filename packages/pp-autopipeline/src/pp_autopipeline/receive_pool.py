"""The receive buffer pool of a built pipeline, and a word where it brings nothing."""

import logging
from importlib.metadata import version

import torch.distributed as dist

from pp_autopipeline.checks import warn_once
from pp_autopipeline.pipeline import BuiltPipeline
from pp_bufferpool import RecvBufferPool, install_recv_buffer_pool, recv_buffer_counts

logger = logging.getLogger(__name__)


def install_pool(built: BuiltPipeline, slack: int) -> RecvBufferPool:
    """Install a pool on this rank's stages; rank 0 says so once if it saves no memory."""
    pool = install_recv_buffer_pool(built.stages, built.schedule, slack)
    if dist.get_rank() != 0:
        return pool
    counts = recv_buffer_counts(built.schedule, slack).values()
    with_pool = sum(count.with_pool for count in counts)
    without = sum(count.without_pool for count in counts)
    if not without:
        warn_once(
            logger, "pp_recv_buffer_pool has no effect: a pipeline of one rank receives nothing"
        )
    elif with_pool >= without:
        warn_once(
            logger,
            f"pp_recv_buffer_pool saves no memory here: with pp_recv_buffer_pool_slack={slack} all "
            f"ranks together keep room for {with_pool} receives, and torch {version('torch')} "
            f"without a pool has {without} at once. What it does give is receives at fixed "
            "addresses",
        )
    return pool
