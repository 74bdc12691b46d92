"""Where this process's random generators are."""

import random
import sys
from typing import Any

import torch


def read_random_streams() -> dict[str, Any]:
    """Return the states of this process's generators, as plain values.

    Python's, torch's on the CPU and, where in use, on the current GPU, and numpy's if it is
    imported.
    """
    streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        streams["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def set_random_streams(streams: dict[str, Any]) -> None:
    """Continue the streams of which `read_random_streams` gave the states."""
    random.setstate(streams["python"])
    torch.set_rng_state(streams["torch"])
    if "numpy" in streams and (numpy := sys.modules.get("numpy")):
        kind, keys, *rest = streams["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
