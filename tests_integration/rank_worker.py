"""What a worker process of the rank pool does: runs jobs, reports, waits for the next one."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

READY = b"ready"
RELEASE = b"release"


def serve(pipe: Connection, stack_path: str, log_path: str) -> None:
    """Runs jobs until the pool goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with open(stack_path, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # Works where the machine's own name does not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gc.freeze()  # so that collecting after each call looks at the call's objects only
        pipe.send_bytes(READY)
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
                _serve_one(pipe, *job)
            except EOFError:
                return


def _serve_one(
    pipe: Connection,
    module_name: str,
    file: str | None,
    qualname: str,
    packed: bytes,
    store: str,
    rank: int,
    world_size: int,
    timeout: float,
) -> None:
    import torch.distributed as dist

    try:
        function: Any = _load(module_name, file)
        for part in qualname.split("."):
            function = getattr(function, part)
        args = pickle.loads(packed)
        _prepare(store, rank, world_size, timeout)
        # Plain pickle copies a tensor's bytes; multiprocessing's own would share its memory.
        report = pickle.dumps({"state": "returned", "value": function(*args)})
    except BaseException as error:
        report = pickle.dumps(_describe(error))
    pipe.send_bytes(report)
    # A rank that destroyed its group now could break a peer's last collective: every rank
    # waits here until all are done.
    if pipe.recv_bytes() == RELEASE and dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Empty torch's caches of what DTensors do: a new mesh equals an old one whose groups are gone."""
    import torch

    if "torch.distributed.tensor" not in sys.modules:
        return
    torch._C._clear_DTensor_sharding_propagator_cache()
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _describe(error: BaseException) -> dict[str, Any]:
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return {
        "state": "raised",
        "type_name": type(error).__name__,
        "message": str(error),
        "details": "".join(traceback.format_exception(type(error), error, frames)),
        "when": time.monotonic(),  # one clock for all processes of a machine
    }


def _prepare(store: str, rank: int, world_size: int, timeout: float) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    # Longer than the call's limit: the pool, which can show stacks, notices a hang first.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout + 60),
    )


def _load(name: str, file: str | None) -> ModuleType:
    """Imports a module as the test process did: by name, or a lone test file by its path."""
    module = sys.modules.get(name)
    if module is None:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if file is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    if module is None or (file is not None and getattr(module, "__file__", file) != file):
        assert file is not None
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module
