"""Lists of plain tensors of any device and dtype: their norms, and scaling in place."""

from collections.abc import Iterable, Sequence

import torch

from pp_schedule import torch_private


def norms(
    tensors: Iterable[torch.Tensor], norm_type: float, foreach: bool | None = None
) -> list[torch.Tensor]:
    """Return the norm of each tensor, in a vector per device and dtype; empty tensors have none.

    Half precision is summed in float32.
    """
    found = []
    for same in _alike([tensor for tensor in tensors if tensor.numel()]):
        wide = _wide(same[0].dtype)
        if foreach is False:
            each = [torch.linalg.vector_norm(tensor, norm_type, dtype=wide) for tensor in same]
        else:
            each = list(torch_private.foreach_norm(same, norm_type, wide))
        found.append(torch.stack(each))
    return found


def multiply(
    tensors: Iterable[torch.Tensor], factor: torch.Tensor, foreach: bool | None = None
) -> None:
    """Multiply tensors in place by a 0-dim factor, without waiting for its value."""
    for same in _alike(tensors):
        # The fused kernel wants the tensors' own dtype; of a factor, half precision is too coarse.
        by = factor.to(same[0].device, _wide(same[0].dtype))
        if foreach is False:
            for tensor in same:
                tensor.mul_(by)
        else:
            torch_private.foreach_mul_(same, by)


def divide(tensors: Iterable[torch.Tensor], divisor: float) -> None:
    """Divide tensors in place."""
    for same in _alike(tensors):
        torch_private.foreach_div_(same, divisor)


def _alike(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
