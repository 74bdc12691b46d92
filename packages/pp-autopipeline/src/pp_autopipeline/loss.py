"""The loss of a batch that is cut into microbatches: the same number whatever the cut."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from pp_autopipeline.loss_probe import IGNORED, LossFunction, LossReduction
from pp_schedule.microbatch_loss import scale_gradient


class BatchLoss:
    """What a schedule calls as its loss, microbatch by microbatch, in order.

    Within `begin` and `end` a mean is weighted by the microbatch's share of the targets that
    count, so that gradients and total are those of the whole batch; a sum needs no weight. Outside
    of them it is the user's loss as it is, its gradient times `share`.

    The whole batch is that of all data-parallel ranks together. Their gradients are averaged
    afterwards, as FSDP2 and DDP do, so each is multiplied by their number here.

    Args:
        loss_fn: The user's.
        reduction: What it returns: a mean or a sum over the targets that count.
        share: What its gradient is multiplied by outside of batches.
        replicas: The groups of this rank's data-parallel axes.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        reduction: LossReduction,
        share: float,
        replicas: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.share = share
        self._replicas = [group for group in replicas if group.size() > 1]
        self._num_replicas = prod(group.size() for group in self._replicas)
        self._total = 0
        self.values: list[torch.Tensor] = []
        self.take_auxiliary_loss: Callable[[], torch.Tensor | None] = lambda: None
        self._auxiliary: list[torch.Tensor] = []
        self._counts: list[int] | None = None

    def begin(self, target: torch.Tensor, num_microbatches: int) -> None:
        """Begin a batch with this rank's whole target; every data-parallel rank calls it."""
        chunks = target.tensor_split(num_microbatches)
        counts = torch.stack([(chunk != IGNORED).sum() for chunk in chunks])
        self._counts = counts.tolist()
        self._total = int(self._summed(counts.sum()).item())
        self.values = []
        self._auxiliary = []

    def end(self, device: torch.device) -> torch.Tensor:
        """End the batch; return its loss in float64, detached; every data-parallel rank calls it."""
        total = torch.zeros((), device=device, dtype=torch.float64)
        for index, value in enumerate(self.values):
            total += value.double() * self._weight(index)
        for auxiliary in self._auxiliary:
            total += auxiliary.double() / (len(self._auxiliary) * self._num_replicas)
        self._counts = None
        return self._summed(total)

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Return the loss of the next microbatch, its gradient weighted."""
        if self._counts is None:
            return scale_gradient(self.loss_fn(output, target), self.share)
        index = len(self.values)
        if self._counts[index]:
            loss = self.loss_fn(output, target)
            self.values.append(loss.detach())
            loss = scale_gradient(loss, self._weight(index) * self._num_replicas)
        else:
            # A mean over nothing is NaN and so are its gradients; nothing counts for nothing.
            loss = (output * 0.0).sum()
            self.values.append(loss.detach())
        auxiliary = self.take_auxiliary_loss()
        if auxiliary is not None:
            # A model computes it over one microbatch; the batch has their mean.
            self._auxiliary.append(auxiliary.detach())
            loss = loss + scale_gradient(auxiliary, 1.0 / len(self._counts)).to(loss)
        return loss

    def _weight(self, index: int) -> float:
        assert self._counts is not None
        return self._counts[index] / max(1, self._total) if self.reduction == "mean" else 1.0

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        for group in self._replicas:
            dist.all_reduce(value, group=group)
        return value
