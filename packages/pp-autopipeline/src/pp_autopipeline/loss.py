"""The loss of a batch that is cut into microbatches: the same number whatever the cut."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from pp_schedule.build import scale_gradient

LossFunction = Callable[..., torch.Tensor]
LossReduction = Literal["mean", "sum"]

IGNORED = -100
"""The target value that counts for nothing, as in `torch.nn.functional.cross_entropy`."""


def find_loss_reduction(
    loss_fn: LossFunction, num_classes: int, device: torch.device
) -> LossReduction:
    """Find out whether a loss is a mean or a sum over the targets that count.

    It is called three times on random logits: on a row with four targets that count, on a row with
    one, and on both rows together.

    Args:
        loss_fn: `loss_fn(logits [rows, length, num_classes], target [rows, length])`.
        num_classes: Size of the logits' last dim.
        device: Where to try it.

    Raises:
        ValueError: If it is neither or cannot be called so; the message says what to do.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 4, num_classes), generator=generator).to(device)
    target = torch.randint(0, num_classes, (2, 4), generator=generator).to(device)
    target[1, 1:] = IGNORED
    advice = "say what it is with loss_reduction='mean' or loss_reduction='sum'"
    try:
        with torch.no_grad():
            first, second, both = (
                float(loss_fn(logits[rows], target[rows]))
                for rows in (slice(0, 1), slice(1, 2), slice(0, 2))
            )
    except Exception as error:
        raise ValueError(
            f"loss_fn cannot be called with logits {[2, 4, num_classes]} and targets [2, 4] in "
            f"which {IGNORED} is to be ignored ({type(error).__name__}: {error}); if it is made "
            f"for something else, {advice}"
        ) from error
    if _close(both, first + second):
        return "sum"
    if _close(both, (4 * first + second) / 5):
        return "mean"
    raise ValueError(
        f"loss_fn is neither a mean nor a sum over the targets that are not {IGNORED}: it gives "
        f"{first:.6g} for a row with 4 targets, {second:.6g} for a row with 1, and {both:.6g} for "
        "both. Targets must be aligned with the logits (shift them before, not inside the loss); "
        f"if the loss is right as it is, {advice}"
    )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-6)


class BatchLoss:
    """What a schedule calls as its loss, microbatch by microbatch, in order.

    Within `begin` and `end` a mean is weighted by the microbatch's share of the targets that
    count, so that gradients and total are those of the whole batch; a sum needs no weight. Outside
    of them it is the user's loss as it is, its gradient times `share`.
    """

    def __init__(self, loss_fn: LossFunction, reduction: LossReduction, share: float) -> None:
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.share = share
        self.values: list[torch.Tensor] = []
        self._counts: list[int] | None = None
        self._finished: list[torch.Tensor] = []

    def begin(self, target: torch.Tensor, num_microbatches: int) -> None:
        """Begin a batch with its whole target."""
        chunks = target.tensor_split(num_microbatches)
        self._counts = torch.stack([(chunk != IGNORED).sum() for chunk in chunks]).tolist()
        self.values = []

    def end(self, device: torch.device) -> torch.Tensor:
        """End the batch; return its loss, detached."""
        assert self._counts is not None
        weights = [self._weight(index) for index in range(len(self.values))]
        self._counts = None
        self._finished = []
        losses = [value * weight for value, weight in zip(self.values, weights, strict=True)]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=device)

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Return the loss of the next microbatch, its gradient weighted."""
        if self._counts is None:
            return scale_gradient(self.loss_fn(output, target), self.share)
        self._release()
        index = len(self.values)
        if self._counts[index]:
            loss = self.loss_fn(output, target)
            self.values.append(loss.detach())
            loss = scale_gradient(loss, self._weight(index))
        else:
            # A mean over nothing is NaN and so are its gradients; nothing counts for nothing.
            loss = (output * 0.0).sum()
            self.values.append(loss.detach())
        if loss.requires_grad:
            loss.register_hook(lambda _: self._finished.append(loss))
        return loss

    def _weight(self, index: int) -> float:
        assert self._counts is not None
        return self._counts[index] / max(1, sum(self._counts)) if self.reduction == "mean" else 1.0

    def _release(self) -> None:
        """Detach losses whose backward has run.

        torch's schedules keep every loss until the step ends, and with it, through its graph, the
        last stage's input of every microbatch (2.15).
        """
        for loss in self._finished:
            loss.detach_()
        self._finished = []
