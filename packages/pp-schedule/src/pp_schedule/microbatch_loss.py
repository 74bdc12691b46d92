"""A microbatch's loss as a schedule needs it: scaled, and let go of once it has been used."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

LossFunction = Callable[..., torch.Tensor]


class MicrobatchLoss:
    """A loss function for schedules, of the same value.

    torch's schedules keep every loss until the step ends, and with it, through its graph, the last
    stage's input of every microbatch (2.15); who passes a list of losses keeps them longer. Here
    each loss is detached when its backward has run.

    Args:
        loss_fn: The user's.
        share: What its gradient is multiplied by.
    """

    def __init__(self, loss_fn: LossFunction, share: float = 1.0) -> None:
        self.loss_fn = loss_fn
        self.share = share

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the next microbatch."""
        loss = self.loss_fn(*args, **kwargs)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return loss
        loss = scale_gradient(loss, self.share)
        assert loss.grad_fn is not None
        loss.grad_fn.register_hook(_detach(weakref.ref(loss)))
        return loss


def _detach(reference: "weakref.ref[torch.Tensor]") -> Callable[..., None]:
    # A reference to the loss itself would have its graph keep it alive.
    def hook(*gradients: Any) -> None:
        if (loss := reference()) is not None:
            loss.detach_()

    return hook


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.clone()  # a view could not be detached later

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.share, None


def scale_gradient(value: torch.Tensor, share: float) -> torch.Tensor:
    """Return `value` such that the gradient that reaches its origin is multiplied by `share`."""
    scaled: torch.Tensor = _ScaleGradient.apply(value, share)
    return scaled
