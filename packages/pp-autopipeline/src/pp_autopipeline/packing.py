"""Plain values as tensors, so that a checkpoint holds tensors alone."""

import io
import pickle
from typing import Any

import torch


def pack(value: Any, what: str) -> torch.Tensor:
    """Return a value as a tensor of bytes.

    Args:
        value: Numbers, strings, tensors, and lists, tuples and dicts of them.
        what: What the value is to the user, for the error.

    Raises:
        ValueError: If it holds anything that could only be read back by running code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except (pickle.PickleError, TypeError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"{what} cannot be saved: it may hold numbers, strings, tensors, and lists, tuples and "
            f"dicts of them ({reason})"
        ) from None
    return packed


def unpack(packed: torch.Tensor) -> Any:
    """Return the value that was packed; no code in it is run."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
