"""Whether a loss is a mean or a sum, found out by trying it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

LossFunction = Callable[..., torch.Tensor]
LossReduction = Literal["mean", "sum"]
TargetKind = Literal["tokens", "rows", "spans"]
"""What a target says: a class per token `[rows, length]`, a class per row `[rows]`, or where a span
starts and ends in each row `[rows, 2]`."""

IGNORED = -100
"""The target value that counts for nothing, as in `torch.nn.functional.cross_entropy`."""

# How many classes a loss is tried on, and how many logits that may take.
_MAX_TRIED, _MAX_LOGITS = 512, 16_000_000

Trial = tuple[torch.Tensor, torch.Tensor]


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
    kind: TargetKind = "tokens",
) -> LossReduction:
    """Find out whether a loss is a mean or a sum over the targets that count.

    It is called on random logits: on rows in which all targets count, half of them, or one, and
    on two such together. The targets are as many different classes as memory allows, up to 512, so
    that a loss that weighs classes shows itself.

    Args:
        loss_fn: `loss_fn(logits, target)`; logits are `[rows, length, num_classes]`, without the
            length if there is a class per row.
        num_classes: Size of the logits' last dim.
        device: Where to try it.
        special: Classes that must be among those tried.
        kind: What a target says, and so its shape.

    Raises:
        ValueError: If it is neither or cannot be called so; the message says what to do.
    """
    trials = [_to(device, trial) for trial in _TRIALS[kind](num_classes, special)]
    advice = "say what it is with loss_reduction='mean' or loss_reduction='sum'"
    logits, target = _joined(trials)
    try:
        with torch.no_grad():
            tried = [*trials, _joined(trials[:2]), _joined(trials[::2])]
            losses = [loss_fn(*trial) for trial in tried]
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
    counts = [int((each != IGNORED).sum()) for _, each in trials]
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
        f"{alone[0]:.6g} where {counts[0]} targets count, {alone[2]:.6g} where {counts[2]} do, and "
        f"{first_and_third:.6g} for both. Targets must be aligned with the logits "
        f"(shift them before, not inside the loss); what does not count must be {IGNORED} "
        f"(target.masked_fill(target == pad, {IGNORED})); classes must weigh the same. If the loss "
        f"is right as it is, {advice}"
    )


def _classes_per_token(num_classes: int, special: Sequence[int]) -> list[Trial]:
    """Return rows of many different classes: logits `[1, n, num_classes]`, targets `[1, n]`.

    All targets of the first count, half of the second's, and one of the third's: its first, which
    a loss that shifts would drop.
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
    logits = torch.randn((3, length, num_classes), generator=generator)
    return [(logits[i : i + 1], target[i : i + 1]) for i in range(3)]


def _class_per_row(num_classes: int, special: Sequence[int]) -> list[Trial]:
    """Return the same classes as so many rows: logits `[n, num_classes]`, targets `[n]`."""
    return [(x[0], y[0]) for x, y in _classes_per_token(num_classes, special)]


def _span_per_row(num_classes: int, special: Sequence[int]) -> list[Trial]:
    """Return four rows of spans, or two, or one, the others not counting: targets `[4, 2]`."""
    generator = torch.Generator().manual_seed(0)
    trials = []
    for counting in (4, 2, 1):
        target = torch.randint(8, (4, 2), generator=generator)
        target[counting:] = IGNORED
        trials.append((torch.randn((4, 8, num_classes), generator=generator), target))
    return trials


_TRIALS: dict[TargetKind, Callable[[int, Sequence[int]], list[Trial]]] = {
    "tokens": _classes_per_token,
    "rows": _class_per_row,
    "spans": _span_per_row,
}


def _to(device: torch.device, trial: Trial) -> Trial:
    return trial[0].to(device), trial[1].to(device)


def _joined(trials: Sequence[Trial]) -> Trial:
    return torch.cat([x for x, _ in trials]), torch.cat([y for _, y in trials])


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-6)
