"""Which rows of a data set a rank gets: alike within a pipeline, others in each replica."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data.distributed import DistributedSampler

from pp_autopipeline.checks import mesh_problems, refuse


class DataParallelSampler(DistributedSampler[int]):
    """Gives the pipeline, tensor- and context-parallel ranks of a replica the same rows.

    As torch's `DistributedSampler`, whose orders it has, but between data-parallel coordinates in
    place of ranks, and with a state. Rows are shuffled by `seed + epoch`, and the replicas take
    turns in drawing them.

    Args:
        dataset: Anything with a length, the same on every rank.
        mesh: The mesh that has the data-parallel axes.
        dp_axis_names: These axes. A mesh that has neither "dp" nor any axis "dp_..." is one replica.
        shuffle: Shuffle the rows anew in each epoch; see `set_epoch`.
        seed: Same seed, same order.
        drop_last: Leave out the last rows if they do not suffice for every replica; else they are
            filled up with the first.

    Raises:
        ValueError: Listing what is wrong with axes and data set.

    Example:
        >>> sampler = DataParallelSampler(dataset, mesh, seed=1)
        >>> loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
        >>> for epoch in range(sampler.epoch, 3):
        ...     sampler.set_epoch(epoch)
        ...     for ids in loader:
        ...         ap.step(ids, target=ids.roll(-1, 1))
    """

    def __init__(
        self,
        dataset: Sized,
        mesh: DeviceMesh,
        dp_axis_names: Sequence[str] = ("dp",),
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        rank, num_replicas = _coordinate(mesh, dp_axis_names)
        if len(dataset) == 0:
            refuse(_REFUSAL, ["dataset has no rows"])
        if drop_last and len(dataset) < num_replicas:
            problem = f"dataset has {len(dataset)} rows for {num_replicas} replicas"
            refuse(_REFUSAL, [f"{problem}, and drop_last=True leaves none: give drop_last=False"])
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self._start = 0
        self._drawn = 0

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        start, self._start = self._start, 0
        self._drawn = start
        left = len(order) - start
        rounds = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        for place in range(start, start + rounds * self.num_replicas, self.num_replicas):
            self._drawn = place + self.num_replicas
            yield order[(place + self.rank) % len(order)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, which starts at the first row.

        In the epoch of a state that was just loaded it starts where that was.
        """
        if epoch != self.epoch:
            self._start = self._drawn = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the last iteration is: the same on every rank of every replica.

        A `DataLoader` with workers draws ahead of what it gives out; torchdata's
        `StatefulDataLoader` knows by how much, and its state has this one in it.
        """
        return {"epoch": self.epoch, "rows_drawn": self._drawn, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration draw what was not drawn yet, by any number of replicas.

        Raises:
            ValueError: The state is that of other rows or of another order.
        """
        mine = self._identity()
        refuse(
            "this state is of another DataParallelSampler",
            [
                f"{name} was {state.get(name)!r} and is {value!r} here"
                for name, value in mine.items()
                if state.get(name) != value
            ],
        )
        self.epoch = state["epoch"]
        self._start = self._drawn = state["rows_drawn"]

    def _identity(self) -> dict[str, Any]:
        rows = len(self.dataset)  # type: ignore[arg-type]
        return {"rows": rows, "shuffle": self.shuffle, "seed": self.seed}

    def _order(self) -> list[int]:
        rows = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(rows))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(rows, generator=generator).tolist()
        return order


_REFUSAL = "DataParallelSampler cannot be made"


def _coordinate(mesh: DeviceMesh, dp_axis_names: Sequence[str]) -> tuple[int, int]:
    """Return which replica this rank is in, and how many there are."""
    if mesh.get_coordinate() is None:
        refuse(_REFUSAL, ["this rank is not in mesh: make a sampler on the ranks that train"])
    problems = mesh_problems(
        mesh, "mesh", {f"dp_axis_names[{i}]": name for i, name in enumerate(dp_axis_names)}
    )
    if problems and tuple(dp_axis_names) == ("dp",):
        # The default names an axis that a mesh need not have, unless it calls it something else.
        others = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp"))
        if not others:
            return 0, 1
        problems = [f"mesh has no axis 'dp': give dp_axis_names={others}"]
    refuse(_REFUSAL, problems)
    rank, num_replicas, seen = 0, 1, set[int]()
    for name in dp_axis_names:
        axis = mesh[name]
        peers = set(axis.mesh.flatten().tolist()) - {torch.distributed.get_rank()}
        if seen & peers:
            given = f"dp_axis_names={tuple(dp_axis_names)}"
            refuse(_REFUSAL, [f"{given}: {name!r} overlaps another of them: leave one out"])
        seen |= peers
        rank = rank * axis.size() + axis.get_local_rank()
        num_replicas *= axis.size()
    return rank, num_replicas
