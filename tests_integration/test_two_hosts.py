"""A pipeline over two hosts, which are network namespaces of this one, and a link that is cut."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from batches import make_batch
from oracle import LEARNING_RATE, token_mean
from tiny_models import tiny_model

WORKER = Path(__file__).parent / "host_worker.py"
STEPS = 3
TIMEOUT = 15  # seconds after which a rank gives its peer up
LINK = "ppveth"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two network namespaces with a cable between them, and what runs there."""

    def __init__(self) -> None:
        self.names = [f"pp-{os.getpid()}-{host}" for host in range(2)]
        self._jobs: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        one, other = self.names
        ip(*f"link add {LINK} netns {one} type veth peer name {LINK} netns {other}".split())
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", LINK, "down")

    def start(self, host: int, folder: Path) -> None:
        """Start torchrun on a host; what it says goes to `host-N.log`."""
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m"]
        command += ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400"]
        # A namespace has no host name of its own, by which torchrun tells whose the endpoint is.
        command += [f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={ADDRESSES[host]}"]
        # The shell keeps the rank's own exit code, whatever becomes of torchrun.
        script = f'"{sys.executable}" "$@"; code=$?; echo $code > "$2/exit-{host}"; exit $code'
        command += ["--no-python", "sh", "-c", script, "sh"]
        command += [str(WORKER), str(folder), str(STEPS), str(TIMEOUT / 60)]
        names = {"GLOO_SOCKET_IFNAME": LINK, "TP_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
        with (folder / f"host-{host}.log").open("wb") as log:
            job = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | names)
        self._jobs.append(job)

    def close(self) -> None:
        """End every process on the hosts, and the hosts."""
        for name in self.names:
            with suppress(OSError):
                for process in ip("netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                ip("netns", "delete", name)
        for job in self._jobs:
            job.wait(20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made with `ip` of iproute2, which is not installed")
    made = Hosts()
    try:
        try:
            made.connect()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made
    finally:
        made.close()


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.1)
    return what()


def train_whole() -> list[float]:
    """The losses of the unsplit model."""
    model = tiny_model("llama", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        inputs = make_batch("padded", 8, seed=step)
        target = inputs.pop("target")
        loss = token_mean(model(**inputs, use_cache=False).logits, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_until_the_link_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    for host in range(2):
        hosts.start(host, tmp_path)

    def said() -> list[str]:
        return [(tmp_path / f"host-{host}.log").read_text() for host in range(2)]

    def ended() -> list[str]:
        codes = [tmp_path / f"exit-{host}" for host in range(2)]
        return [code.read_text().strip() if code.exists() else "" for code in codes]

    wait_for(lambda: len(list(tmp_path.glob("trained-*"))) == 2 or any(ended()), 60)
    assert ended() == ["", ""], "\n".join(said())
    wanted = train_whole()
    for log in said():
        losses = [float(loss) for loss in re.findall(r"^loss (\S+)$", log, re.MULTILINE)]
        assert losses == pytest.approx(wanted, rel=1e-9), log

    hosts.cut()
    assert wait_for(lambda: all(ended()), TIMEOUT + 15), "\n".join(said())
    assert "0" not in ended()
    ranks = [int(re.findall(r"\[rank(\d)\]:", log)[0]) for log in said()]
    assert sorted(ranks) == [0, 1]
    for rank, log in zip(ranks, said(), strict=True):
        message = log[log.rindex("RuntimeError: rank") :]
        assert f"rank {rank} (pipeline rank {rank} of 2, stage {rank}) lost another rank" in message
        assert f"Timed out waiting {TIMEOUT * 1000}ms" in message
        assert f"exchanges tensors of the pipeline with rank {1 - rank} (stage {1 - rank})" in log
        assert "the network between two hosts does not deliver" in message
