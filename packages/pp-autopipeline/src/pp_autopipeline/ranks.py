"""The ranks that write a checkpoint together, with a process group of their own."""

from typing import Any

import torch.distributed as dist


class Ranks:
    """A gloo group of its own, so that what is sent in the background does not meet training.

    Args:
        group: Whose ranks; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        members = dist.get_process_group_ranks(group)
        own = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        self.group = own
        self.rank = dist.get_rank(own)
        self.size = dist.get_world_size(own)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank gave, on every rank."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def from_first(self, value: Any) -> Any:
        """Return what the first rank gave, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=self.global_rank(0), group=self.group)
        return values[0]

    def global_rank(self, rank: int) -> int:
        """Return the number among all ranks of one in this group."""
        return dist.get_global_rank(self.group, rank)
