"""torch's writer of checkpoint files, with the operating system's word on what went wrong."""

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class DiskWriter(FileSystemWriter):
    """Writes one rank's file; an error in it is the system's own, such as a full disk."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives this rank."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # torch's zip writer trips over its own position after a write that failed, and what
            # came first does not travel to the other ranks.
            raise _root(error) from None


def _root(error: BaseException) -> BaseException:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error
