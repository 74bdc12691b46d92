"""Clocks: when something happened on a device, and how far the clocks of ranks are apart."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class HostStopwatch:
    """Marks moments of the CPU."""

    error = 0.0
    """The most by which a moment may be off, in seconds."""
    mark = staticmethod(time.perf_counter)
    """Returns this moment."""

    def stop(self) -> Callable[[Any], float]:
        """Return what converts moments to seconds of `time.perf_counter`."""
        return float


class DeviceStopwatch:
    """Marks moments of an accelerator's current stream, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.error = float("inf")
        """The most by which a moment may be off, in seconds; known after `stop`."""
        self._device = device
        self._module = torch.get_device_module(device)

    def mark(self) -> Any:
        """Return the moment at which the stream arrives here."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> Callable[[Any], float]:
        """Wait for the device; return what converts moments to seconds of `time.perf_counter`.

        One moment is marked on both clocks: the device reaches it between two readings of the
        CPU's, of which the closest pair of several counts.
        """
        anchor, seconds = None, 0.0
        self._module.synchronize(self._device)
        for _ in range(8):
            before = time.perf_counter()
            event = self.mark()
            self._module.synchronize(self._device)
            after = time.perf_counter()
            if (after - before) / 2 < self.error:
                anchor, seconds, self.error = event, (before + after) / 2, (after - before) / 2

        def convert(event: Any) -> float:
            return seconds - float(event.elapsed_time(anchor)) / 1e3

        return convert


def make_stopwatch(device: torch.device) -> HostStopwatch | DeviceStopwatch:
    """Return the stopwatch for work on a device."""
    return HostStopwatch() if device.type == "cpu" else DeviceStopwatch(device)


@dataclass(frozen=True)
class ClockOffset:
    """What to add to this rank's clock to have that of the group's rank 0."""

    seconds: float
    """The offset, as estimated."""
    error: float
    """The most by which it may be wrong: half the round trip of the message it comes from."""


def align_clocks(
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = 32,
) -> ClockOffset:
    """Estimate the offset of this rank's clock; every rank of the group calls it.

    As in NTP: a rank asks rank 0 for its time, several times, and supposes that the answer was made
    in the middle of the round trip. The shortest round trip counts, since it leaves least room for
    error. Clocks that run at different speeds drift apart afterwards, by up to some
    ten microseconds per second between machines.

    Args:
        group: The ranks; None for all.
        device: Where messages of the group live.
        clock: Seconds since any moment.
        rounds: How often each rank asks.
    """
    if dist.get_rank(group) != 0:
        return _ask(group, device, clock, rounds)
    for peer in range(1, dist.get_world_size(group)):
        _answer(group, device, clock, rounds, peer)
    return ClockOffset(0.0, 0.0)


def _ask(
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Callable[[], float],
    rounds: int,
) -> ClockOffset:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    best = ClockOffset(0.0, float("inf"))
    for _ in range(rounds):
        before = clock()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = message.item()  # on an accelerator this waits until it is there
        after = clock()
        error = (after - before) / 2
        if error < best.error:
            best = ClockOffset(theirs - (before + after) / 2, error)
    return best


def _answer(
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Callable[[], float],
    rounds: int,
    peer: int,
) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(rounds):
        dist.recv(message, group=group, group_src=peer)
        message.item()
        message.fill_(clock())
        dist.send(message, group=group, group_dst=peer)
