import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from pp_schedule.microbatch_loss import MicrobatchLoss


def each_row(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean(-1, keepdim=True)[0, 0]  # a view


@pytest.mark.parametrize("loss_fn", [mse_loss, each_row])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_value_gradient_and_end_of_a_loss(loss_fn: Callable[..., Any], share: float) -> None:
    output, target = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    wanted = loss_fn(output, target)
    wanted.backward()
    gradient, output.grad = output.grad, None
    assert gradient is not None
    loss = MicrobatchLoss(loss_fn, share)(output, target)
    assert loss.requires_grad
    loss.backward()
    assert torch.equal(loss, wanted.detach())
    assert torch.equal(output.grad, gradient * share)
    assert not loss.requires_grad


def test_what_a_loss_was_made_of_is_let_go_while_the_loss_is_kept() -> None:
    gc.disable()
    try:
        weight = torch.randn(3, requires_grad=True)
        activations = weight * 2
        gone = weakref.ref(activations)
        loss = MicrobatchLoss(mse_loss)(activations, torch.zeros(3))
        loss.backward()
        del activations
        assert gone() is None
        assert loss.item() > 0
    finally:
        gc.enable()


def test_half_a_backward_ends_a_loss_too() -> None:
    activations, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    loss = MicrobatchLoss(mse_loss)(activations * weight, torch.zeros(3))
    torch.autograd.grad(loss, activations, retain_graph=True)
    assert not loss.requires_grad


def test_a_loss_that_takes_no_gradient_is_left_alone() -> None:
    output = torch.randn(3)
    plain: Any = object()
    assert not MicrobatchLoss(mse_loss)(output, output).requires_grad
    assert MicrobatchLoss(lambda *args: plain)(output, output) is plain
