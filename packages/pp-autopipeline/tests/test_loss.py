from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from pp_autopipeline import find_loss_reduction
from pp_autopipeline.loss import BatchLoss
from pp_autopipeline.loss_probe import TargetKind

CPU = torch.device("cpu")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_sum(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def guides_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.float().view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100
    )


def mean_over_all_positions(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return token_sum(logits, target) / target.numel()


def mean_of_rows(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows = [token_mean(x[None], y[None]) for x, y in zip(logits, target, strict=True)]
    return torch.stack(rows).mean()


def shifting(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return token_mean(logits[:, :-1], target[:, 1:])


@pytest.mark.parametrize(
    ("loss_fn", "wanted"),
    [
        (token_mean, "mean"),
        (guides_loss, "mean"),
        (lambda x, y: 3 * token_mean(x, y), "mean"),
        (lambda x, y: token_mean(x.bfloat16().float(), y), "mean"),
        (token_sum, "sum"),
        (lambda x, y: token_sum(x, y) / 7, "sum"),
    ],
)
@pytest.mark.parametrize("num_classes", [2, 64, 1000])
def test_reduction(loss_fn: Loss, wanted: str, num_classes: int) -> None:
    assert find_loss_reduction(loss_fn, num_classes, CPU) == wanted


def span_mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)  # over the positions, for start and end


@pytest.mark.parametrize("kind", ["rows", "spans"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduction_of_targets_per_row(kind: TargetKind, reduction: str) -> None:
    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert logits.shape[:1] == target.shape[:1]
        assert logits.ndim == (2 if kind == "rows" else 3)
        return F.cross_entropy(logits, target, reduction=reduction)

    assert find_loss_reduction(loss_fn, 2, CPU, kind=kind) == reduction


def test_a_loss_that_clamps_what_does_not_count() -> None:
    with pytest.raises(ValueError, match="neither a mean nor a sum"):
        find_loss_reduction(lambda x, y: span_mean(x, y.clamp(0)), 2, CPU, kind="spans")


@pytest.mark.parametrize("loss_fn", [mean_of_rows, mean_over_all_positions, shifting])
def test_neither(loss_fn: Loss) -> None:
    with pytest.raises(ValueError, match="neither a mean nor a sum") as caught:
        find_loss_reduction(loss_fn, 64, CPU)
    assert "shift them before" in str(caught.value)
    assert "loss_reduction='mean'" in str(caught.value)


def test_a_loss_that_cannot_be_called() -> None:
    with pytest.raises(ValueError, match="cannot be called") as caught:
        find_loss_reduction(lambda output, target: output.logits, 64, CPU)
    assert "loss_reduction='sum'" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_finding_out_leaves_the_random_stream_and_gradients_alone() -> None:
    weight = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    find_loss_reduction(lambda x, y: token_mean(x * weight, y), 64, CPU)
    assert torch.equal(torch.rand(2), wanted)
    assert weight.grad is None


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and target of 8 rows, of which some have no or few targets that count."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 5, 10, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 10, (8, 5), generator=generator)
    target[:2] = -100
    target[3, 1:] = -100
    target[7, :2] = -100
    return logits.requires_grad_(), target


def run(loss: BatchLoss, logits: torch.Tensor, target: torch.Tensor, n: int) -> torch.Tensor:
    loss.begin(target, n)
    for x, y in zip(logits.tensor_split(n), target.tensor_split(n), strict=True):
        loss(x, y).backward()
    return loss.end(CPU)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize(("loss_fn", "reduction"), [(token_mean, "mean"), (token_sum, "sum")])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_cut_changes_neither_loss_nor_gradients(
    loss_fn: Loss, reduction: str, num_microbatches: int, share: float
) -> None:
    logits, target = batch()
    wanted = loss_fn(logits, target)
    wanted.backward()
    gradient, logits.grad = logits.grad, None
    total = run(BatchLoss(loss_fn, reduction, share), logits, target, num_microbatches)
    assert not total.requires_grad
    torch.testing.assert_close(total, wanted.detach())
    torch.testing.assert_close(logits.grad, gradient)


def test_values_are_those_of_the_users_loss() -> None:
    logits, target = batch()
    loss = BatchLoss(token_mean, "mean", 1.0)
    run(loss, logits, target, 4)
    assert float(loss.values[0]) == 0.0
    for index in range(1, 4):
        rows = slice(2 * index, 2 * index + 2)
        torch.testing.assert_close(
            loss.values[index], token_mean(logits[rows], target[rows]).detach()
        )
    assert not any(value.requires_grad for value in loss.values)


@pytest.mark.parametrize(("loss_fn", "reduction"), [(token_mean, "mean"), (token_sum, "sum")])
def test_nothing_counts(loss_fn: Loss, reduction: str) -> None:
    logits, target = batch()
    total = run(BatchLoss(loss_fn, reduction, 1.0), logits, torch.full_like(target, -100), 4)
    assert float(total) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_batches_follow_each_other() -> None:
    logits, target = batch()
    loss = BatchLoss(token_mean, "mean", 1.0)
    first = run(loss, logits, target, 4)
    other = target.roll(1, 0)
    assert run(loss, logits, other, 2) != first
    assert len(loss.values) == 2
    torch.testing.assert_close(run(loss, logits, target, 4), first)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_outside_of_a_batch_it_is_the_users_loss(share: float) -> None:
    logits, target = batch()
    wanted = token_mean(logits, target)
    wanted.backward()
    gradient, logits.grad = logits.grad, None
    assert gradient is not None
    value = BatchLoss(token_mean, "mean", share)(logits, target)
    value.backward()
    assert value.item() == wanted.item()
    torch.testing.assert_close(logits.grad, gradient * share)
