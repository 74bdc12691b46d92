"""What was measured at each step, as one line of JSON."""

import json
import os
from pathlib import Path

from torch import Tensor


class Metrics:
    """The file of metrics of a run.

    Args:
        path: The file; None for a rank that writes none.
        done: The steps of an earlier part of the run: their lines stay, later ones go.
    """

    def __init__(self, path: Path | None, done: int) -> None:
        kept = []
        if path is not None and done and path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and _step(line) <= done]
        self._file = Path(path or os.devnull).open("w")  # noqa: SIM115  closed by close
        self._file.writelines(kept)

    def write(
        self, step: int, loss: float, rate: float, norm: Tensor, speed: float, seconds: float
    ) -> None:
        """Write the line of a step; tokens per second, and seconds."""
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(norm),
            "tokens_per_second": round(speed, 1),
            "step_seconds": round(seconds, 4),
        }
        print(json.dumps(record), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: str) -> int:
    return int(json.loads(line)["step"])
