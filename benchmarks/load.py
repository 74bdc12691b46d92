"""What reading a checkpoint into stages costs, beside `from_pretrained` and a plain read.

    python benchmarks/load.py

A Llama of about 2 GB in bfloat16 is written, sharded, into a temporary folder. Then, in turn and
each in processes of its own, with the files out of the page cache: two ranks build their stages and
read them; one process reads the whole model with `from_pretrained`, which maps the files (5.24), and
touches every page, as the first step would; two processes read the bytes of the stages with plain
reads. Imports are not counted. The table has medians over the rounds. Linux only: memory and bytes
that came from the disk are read in /proc.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

PIECE = 8 << 20
Figures = dict[str, float]


def main() -> None:
    """Run all rounds and print the table; `--job` is for the processes of a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=20, help="of the model; 20 make 2 GB")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        JOBS[arguments.job](arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_job("write", Path(folder), str(arguments.layers))
        rounds = []
        for _ in range(arguments.rounds):
            for job, num_ranks in (("stages", 2), ("whole", 1), ("plain", 2)):
                if not arguments.warm:
                    drop_cache(Path(folder))
                rounds += [{"job": job, **f} for f in run_job(job, Path(folder), ranks=num_ranks)]
    show(rounds)
    if arguments.json:
        with arguments.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rounds)


def run_job(job: str, folder: Path, *more: str, ranks: int = 1) -> list[Figures]:
    """Run a job in fresh processes; return what each rank wrote."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    layers = ["--layers", *more] if more else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    subprocess.run(
        [*command, __file__, "--job", job, "--folder", str(folder), *layers],
        check=True,
        env=environment,
    )
    written = sorted(folder.glob(f"{job}-*.figures"))
    return [json.loads(file.read_text()) for file in written]


def drop_cache(folder: Path) -> None:
    """Take the checkpoint's files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(work: Callable[[], int]) -> Figures:
    """Return seconds, and megabytes: what `work` says it has, the peak it added, what it read."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, read, start = resident("VmRSS"), bytes_read(), time.perf_counter()
    size = work()
    return {
        "seconds": time.perf_counter() - start,
        "size_mb": size / 1e6,
        "peak_added_mb": (resident("VmHWM") - before) / 1e6,
        "read_mb": (bytes_read() - read) / 1e6,
    }


def resident(which: str) -> int:
    """Bytes of resident memory: `VmRSS` now or `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024


def bytes_read() -> int:
    """Bytes that this process has had from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def note(job: str, folder: Path, rank: int, figures: Figures) -> None:
    """Leave figures for the process that runs the rounds."""
    (folder / f"{job}-{rank}.figures").write_text(json.dumps({"rank": rank, **figures}))


def config(num_layers: int) -> Any:
    """Return the config of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=num_layers,
        num_attention_heads=16, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip


def write(folder: Path) -> None:
    """Write the checkpoint."""
    from transformers import LlamaForCausalLM

    layers = int(sys.argv[sys.argv.index("--layers") + 1])
    model = LlamaForCausalLM._from_config(config(layers), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def stages(folder: Path) -> None:
    """Build this rank's stages of the model and read their weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    from pp_autopipeline import AutoPipeline, init_empty_weights, initialize_distributed

    initialize_distributed("gloo", timeout_minutes=5)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    dist.barrier()

    started = time.perf_counter()
    built = started

    def work() -> int:
        nonlocal started, built
        started = time.perf_counter()
        with init_empty_weights():
            empty = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
            )
        ap = AutoPipeline(mesh, pp_batch_size=2).build(empty)
        built = time.perf_counter()
        ap.load_pretrained(folder)
        return sum(p.numel() * p.element_size() for p in ap.parameters())

    figures = measure(work)
    note("stages", folder, dist.get_rank(), {**figures, "build_seconds": built - started})
    dist.barrier()
    dist.destroy_process_group()


def whole(folder: Path) -> None:
    """Read the whole model as Transformers does."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import pp_autopipeline  # noqa: F401  that both have the same interpreter to begin with

    torch.set_num_threads(1)

    def work() -> int:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.detach().view(-1)[::1024].float().sum()
        return sum(p.numel() * p.element_size() for p in model.parameters())

    note("whole", folder, 0, measure(work))


def plain(folder: Path) -> None:
    """Read as many bytes as a stage has, from the same files, and drop them."""
    rank = int(os.environ["RANK"])
    size = int(json.loads((folder / f"stages-{rank}.figures").read_text())["size_mb"] * 1e6)

    def work() -> int:
        left, buffer = size, bytearray(PIECE)
        files = sorted(folder.glob("*.safetensors"), reverse=rank == 1)
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while left > 0 and (got := opened.readinto(buffer)):
                    left -= got
        return size

    note("plain", folder, rank, measure(work))


def show(rounds: list[dict[str, Any]]) -> None:
    """Print the median of every figure, and the ratios that matter."""
    jobs = [("stages", 0), ("stages", 1), ("whole", 0), ("plain", 0), ("plain", 1)]
    print(
        f"{'job':<8}{'rank':>5}{'size MB':>10}{'added MB':>10}{'x':>6}{'read MB':>10}{'x':>6}",
        end="",
    )
    print(f"{'seconds':>9}{'of it building':>16}")
    seconds = {}
    for job, rank in jobs:
        rows = [row for row in rounds if (row["job"], row["rank"]) == (job, rank)]
        size, peak, read, took = (
            median(row[name] for row in rows)
            for name in ("size_mb", "peak_added_mb", "read_mb", "seconds")
        )
        building = median(row.get("build_seconds", 0.0) for row in rows)
        seconds[job] = max(took, seconds.get(job, 0.0))
        print(
            f"{job:<8}{rank:>5}{size:>10.1f}{peak:>10.1f}{peak / size:>6.2f}{read:>10.1f}", end=""
        )
        print(f"{read / size:>6.2f}{took:>9.2f}{building:>16.2f}")
    print(
        f"\nStages / from_pretrained: {seconds['stages'] / seconds['whole']:.2f} of the time; "
        f"stages / plain read of the same bytes: {seconds['stages'] / seconds['plain']:.2f}"
    )


JOBS: dict[str, Callable[[Path], None]] = {
    "write": write,
    "stages": stages,
    "whole": whole,
    "plain": plain,
}

if __name__ == "__main__":
    main()
