"""The ranks that write a checkpoint together, with a process group of their own."""

from typing import Any

import torch.distributed as dist

from pp_split_hf import AllOrNone


class Ranks(AllOrNone):
    """Ranks with a gloo group of their own: what is sent in the background does not meet training.

    Args:
        group: Whose ranks; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        members = dist.get_process_group_ranks(group)
        own = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        super().__init__(own)
        self.group = own
        self.size = dist.get_world_size(own)

    def from_first(self, value: Any) -> Any:
        """Return what the first rank gave, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=self.global_rank(0), group=self.group)
        return values[0]

    def global_rank(self, rank: int) -> int:
        """Return the number among all ranks of one in this group."""
        return dist.get_global_rank(self.group, rank)
