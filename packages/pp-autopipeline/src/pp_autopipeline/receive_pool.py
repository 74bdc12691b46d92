"""The receive buffer pool of a built pipeline, and a word where it brings nothing."""

import logging
from importlib.metadata import version

from pp_autopipeline.pipeline import BuiltPipeline
from pp_bufferpool import RecvBufferPool, install_recv_buffer_pool, recv_buffer_counts

logger = logging.getLogger(__name__)


def install_pool(built: BuiltPipeline, slack: int) -> RecvBufferPool:
    """Install a pool on this rank's stages; the first rank says so if it saves no memory."""
    pool = install_recv_buffer_pool(built.stages, built.schedule, slack)
    if not any(stage.is_first for stage in built.stages):
        return pool
    counts = recv_buffer_counts(built.schedule, slack).values()
    with_pool = sum(count.with_pool for count in counts)
    without = sum(count.without_pool for count in counts)
    if not without:
        logger.warning("pp_recv_buffer_pool has no effect: a pipeline of one rank receives nothing")
    elif with_pool >= without:
        logger.warning(
            "pp_recv_buffer_pool saves no memory here: with pp_recv_buffer_pool_slack=%d all ranks "
            "together keep room for %d receives, and torch %s without a pool has %d at once. What "
            "it does give is receives at fixed addresses",
            slack,
            with_pool,
            version("torch"),
            without,
        )
    return pool
