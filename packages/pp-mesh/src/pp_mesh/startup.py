"""Starts and ends the process group of a job."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pp_mesh.timeouts import timeout_problems

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_IDENTITY = _VARIABLES[:3]  # a cluster may set the address for other reasons


@dataclass(frozen=True)
class DistInfo:
    """What this process is in the job."""

    backend: str
    """Backend of the default process group, such as "nccl" or "gloo"."""

    rank: int
    """Global rank, from 0."""

    world_size: int
    """Number of ranks."""

    device: torch.device
    """The device this rank computes on."""

    is_main: bool
    """Whether this is rank 0."""


def initialize_distributed(backend: str | None = None, timeout_minutes: float = 1) -> DistInfo:
    """Initialises the default process group; every rank of the job calls it.

    Reads torchrun's environment variables. Without them it makes a world of one rank and opens
    no port. On CUDA the rank's device is the one that LOCAL_RANK numbers, and is made current.
    The group is destroyed when the process exits. If a process group exists already, it is left
    as it is and described.

    Args:
        backend: None: "nccl" where there is a CUDA device, else "gloo".
        timeout_minutes: After which a collective that a peer does not join fails.

    Returns:
        This process's place in the job.

    Raises:
        RuntimeError: Some of torchrun's variables are set and others are missing, or a process
            group with another backend exists already.
        ValueError: An argument or variable makes no sense, or LOCAL_RANK has no CUDA device.
    """
    if problems := timeout_problems(timeout_minutes):
        raise ValueError("; ".join(problems))
    if dist.is_initialized():
        if backend not in (None, _backend()):
            raise RuntimeError(
                f"backend={backend!r} was asked for, but the process group runs on "
                f"{_backend()!r} already: call destroy_distributed() first"
            )
        return _describe()
    numbers = _torchrun_numbers()
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "nccl" in backend:
        _choose_cuda_device(backend, 0 if numbers is None else numbers["LOCAL_RANK"])
    timeout = timedelta(minutes=timeout_minutes)
    if numbers is None:
        # The store is this process's memory: nobody else has to find it.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    atexit.register(destroy_distributed)
    return _describe()


def destroy_distributed() -> None:
    """Destroys all process groups, if there are any; every rank of the job calls it."""
    atexit.unregister(destroy_distributed)
    if dist.is_initialized():
        dist.destroy_process_group()


def _torchrun_numbers() -> dict[str, int] | None:
    if not any(name in os.environ for name in _IDENTITY):
        return None
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        present = [name for name in _VARIABLES if name in os.environ]
        raise RuntimeError(
            f"{', '.join(present)} set but {', '.join(missing)} missing in the environment: start "
            "with torchrun, which sets all of them, or unset them to run on one rank"
        )
    wrong = [name for name in _IDENTITY if not os.environ[name].strip().isdecimal()]
    if wrong:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in wrong)
        raise ValueError(f"not a number in the environment: {values}")
    numbers = {name: int(os.environ[name]) for name in _IDENTITY}
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ValueError(
            f"RANK={numbers['RANK']} in the environment must be less than "
            f"WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    return numbers


def _choose_cuda_device(backend: str, local_rank: int) -> None:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"backend {backend!r} with LOCAL_RANK {local_rank} needs {local_rank + 1} CUDA "
            f"devices, but {count} can be seen: start {count or 'no'} ranks per node, or use "
            "backend='gloo'"
        )
    torch.cuda.set_device(local_rank)


def _backend() -> str:
    # A group that was made without naming a backend calls its own "undefined".
    backend = dist.get_backend()
    return dist.get_backend_config() if backend == "undefined" else backend


def _describe() -> DistInfo:
    backend, rank = _backend(), dist.get_rank()
    if "nccl" in backend:
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    return DistInfo(backend, rank, dist.get_world_size(), device, rank == 0)
