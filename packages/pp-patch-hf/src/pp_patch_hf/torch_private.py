"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0."""

import torch


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another, which no in-place detach bears."""
    return bool(tensor._is_view())
