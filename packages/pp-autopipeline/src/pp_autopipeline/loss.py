"""The loss of a batch that is cut into microbatches: the same number whatever the cut."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from pp_schedule.build import scale_gradient

LossFunction = Callable[..., torch.Tensor]
LossReduction = Literal["mean", "sum"]

IGNORED = -100
"""The target value that counts for nothing, as in `torch.nn.functional.cross_entropy`."""


# How many classes a loss is tried on, and how many logits that may take.
_MAX_TRIED, _MAX_LOGITS = 512, 16_000_000


def special_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids that a model's config names, such as padding: a loss may weigh them apart."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return ()
    config = config.get_text_config(decoder=True)
    ids = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    return tuple(i for i in ids if isinstance(i, int) and i >= 0)


def find_loss_reduction(
    loss_fn: LossFunction,
    num_classes: int,
    device: torch.device,
    special: Sequence[int] = (),
) -> LossReduction:
    """Find out whether a loss is a mean or a sum over the targets that count.

    It is called on random logits: on rows in which all targets count, half of them, or one, and
    on two such rows together. The targets are as many different classes as memory allows, up to
    512, so that a loss that weighs classes shows itself.

    Args:
        loss_fn: `loss_fn(logits [rows, length, num_classes], target [rows, length])`.
        num_classes: Size of the logits' last dim.
        device: Where to try it.
        special: Classes that must be among those tried.

    Raises:
        ValueError: If it is neither or cannot be called so; the message says what to do.
    """
    logits, target = (each.to(device) for each in _trial(num_classes, special))
    advice = "say what it is with loss_reduction='mean' or loss_reduction='sum'"
    try:
        with torch.no_grad():
            losses = [
                loss_fn(logits[rows], target[rows]) for rows in ([0], [1], [2], [0, 1], [0, 2])
            ]
            shapes = {tuple(loss.shape) for loss in losses}
            *alone, first_two, first_and_third = (float(loss.sum()) for loss in losses)
    except Exception as error:
        raise ValueError(
            f"loss_fn cannot be called with logits {list(logits.shape)} and targets "
            f"{list(target.shape)} in which {IGNORED} is to be ignored ({type(error).__name__}: "
            f"{error}); if it is made for something else, {advice}"
        ) from error
    if shapes != {()}:
        raise ValueError(
            f"loss_fn returns a tensor of shape {sorted(shapes)[-1]}; a loss is one number: use "
            "its mean or its sum"
        )
    counts = [int((row != IGNORED).sum()) for row in target]
    together = {1: first_two, 2: first_and_third}
    if all(_close(both, alone[0] + alone[i]) for i, both in together.items()):
        return "sum"
    if all(
        _close(both, (counts[0] * alone[0] + counts[i] * alone[i]) / (counts[0] + counts[i]))
        for i, both in together.items()
    ):
        return "mean"
    raise ValueError(
        f"loss_fn is neither a mean nor a sum over the targets that are not {IGNORED}: it gives "
        f"{alone[0]:.6g} for a row with {counts[0]} targets, {alone[2]:.6g} for a row with "
        f"{counts[2]}, and {first_and_third:.6g} for both. Targets must be aligned with the logits "
        f"(shift them before, not inside the loss); what does not count must be {IGNORED} "
        f"(target.masked_fill(target == pad, {IGNORED})); classes must weigh the same. If the loss "
        f"is right as it is, {advice}"
    )


def _trial(num_classes: int, special: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [3, n, num_classes] and targets [3, n] of many different classes.

    All targets of the first row count, half of the second's, and one of the third's: its first,
    which a loss that shifts would drop.
    """
    generator = torch.Generator().manual_seed(0)
    room = max(6, min(_MAX_TRIED, _MAX_LOGITS // num_classes))
    classes = torch.randperm(num_classes, generator=generator).tolist()
    first = [i for i in dict.fromkeys(special) if i < num_classes]
    chosen = (first + [i for i in classes if i not in set(first)])[:room]
    while len(chosen) < 6:  # few classes come up more than once
        chosen += chosen
    length = 2 * len(chosen) // 3
    target = torch.full((3, length), IGNORED)
    target[0] = torch.tensor(chosen[:length])
    rest = torch.tensor(chosen[length:])
    target[1, : len(rest)] = rest
    target[2, 0] = chosen[-1]
    return torch.randn((3, length, num_classes), generator=generator), target


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
        self.take_auxiliary_loss: Callable[[], torch.Tensor | None] = lambda: None
        self._auxiliary: list[torch.Tensor] = []
        self._counts: list[int] | None = None
        self._losses: list[torch.Tensor] = []
        self._finished: list[int] = []

    def begin(self, target: torch.Tensor, num_microbatches: int) -> None:
        """Begin a batch with its whole target."""
        chunks = target.tensor_split(num_microbatches)
        self._counts = torch.stack([(chunk != IGNORED).sum() for chunk in chunks]).tolist()
        self.values = []
        self._auxiliary = []

    def end(self, device: torch.device) -> torch.Tensor:
        """End the batch; return its loss in float64, detached."""
        total = torch.zeros((), device=device, dtype=torch.float64)
        for index, value in enumerate(self.values):
            total += value.double() * self._weight(index)
        for auxiliary in self._auxiliary:
            total += auxiliary.double() / len(self._auxiliary)
        self._counts = None
        self._release(range(len(self._losses)))
        self._losses = []
        self._finished = []
        return total

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Return the loss of the next microbatch, its gradient weighted."""
        if self._counts is None:
            return scale_gradient(self.loss_fn(output, target), self.share)
        self._release(self._finished)
        self._finished = []
        index = len(self.values)
        if self._counts[index]:
            loss = self.loss_fn(output, target)
            self.values.append(loss.detach())
            loss = scale_gradient(loss, self._weight(index))
        else:
            # A mean over nothing is NaN and so are its gradients; nothing counts for nothing.
            loss = (output * 0.0).sum()
            self.values.append(loss.detach())
        auxiliary = self.take_auxiliary_loss()
        if auxiliary is not None:
            # A model computes it over one microbatch; the batch has their mean.
            self._auxiliary.append(auxiliary.detach())
            loss = loss + scale_gradient(auxiliary, 1.0 / len(self._counts)).to(loss)
        self._losses.append(loss)
        if loss.requires_grad:
            # The hook knows a number and not the loss, which would keep itself alive.
            finished = self._finished_later(index)
            loss.register_hook(finished)
        return loss

    def _finished_later(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._finished.append(index)

        return hook

    def _weight(self, index: int) -> float:
        assert self._counts is not None
        return self._counts[index] / max(1, sum(self._counts)) if self.reduction == "mean" else 1.0

    def _release(self, indices: Iterable[int]) -> None:
        """Detach losses whose backward has run.

        torch's schedules keep every loss until the step ends, and with it, through its graph, the
        last stage's input of every microbatch (2.15).
        """
        for index in indices:
            self._losses[index].detach_()
