"""A folder of checkpoints on disk, each complete or absent whatever happens meanwhile."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from pp_split_hf.publish import flush, flush_folder, publish_folder, restore_folder

logger = logging.getLogger(__name__)

_MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """The checkpoints in a folder. Whatever changes something is for one process to call.

    Args:
        path: The folder; made when first written to.
        keep_last: How many of the newest checkpoints to keep; None keeps all.
        keep_every: Also keep those whose step is a multiple of this.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep_last: int | None, keep_every: int | None
    ) -> None:
        self.path = Path(path)
        self._keep_last = keep_last
        self._keep_every = keep_every

    def of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Return the folder in which a step's checkpoint is written."""
        return self.path / f".step-{step:08d}.partial"

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        named = [(_NAME.fullmatch(entry.name), entry) for entry in self.path.iterdir()]
        return sorted(int(name[1]) for name, entry in named if name and is_complete(entry))

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last, if there is one.

        It is the one that the file `latest` names; where that is missing or names one that is not
        complete, the complete one that was saved last.
        """
        steps = self.steps()
        try:
            name = _NAME.fullmatch((self.path / "latest").read_text().strip())
        except OSError:
            name = None
        if name and int(name[1]) in steps:
            return int(name[1])
        return max(steps, key=self._number) if steps else None

    def restore(self) -> None:
        """Give checkpoints their names back that were set aside by a save that was killed."""
        for entry in self.path.glob(".step-*.old"):
            restore_folder(self.path / entry.name.removeprefix(".").removesuffix(".old"))

    def _number(self, step: int) -> int:
        """Return which save a checkpoint is of; later ones have higher numbers."""
        try:
            return int(json.loads((self.of(step) / _MARKER).read_text())["number"])
        except (OSError, ValueError, KeyError):
            return 0

    def remove_leftovers(self) -> None:
        """Remove what saves and removals left behind that were killed, where that can be done."""
        try:
            self.restore()
            for entry in self.path.iterdir() if self.path.is_dir() else ():
                is_torn = _NAME.fullmatch(entry.name) and not is_complete(entry)
                if entry.name.startswith(".step-") or is_torn:
                    shutil.rmtree(entry, ignore_errors=True)
        except OSError as error:
            logger.warning("what killed saves may have left cannot be removed: %s", error)

    def publish(self, step: int, num_files: int) -> None:
        """Make a checkpoint that is written the latest one, and remove those not to be kept.

        Args:
            step: The step in whose `partial` folder it was written.
            num_files: How many files of tensors there must be.

        Raises:
            OSError: If it is not complete on disk. What was there before is as it was.
        """
        partial, final = self.partial(step), self.of(step)
        there = len(list(partial.glob("*.distcp")))
        if there != num_files:
            raise OSError(
                f"{there} of {num_files} files are in {partial}: use a folder that all ranks share"
            )
        flush_folder(partial)
        is_new = not is_complete(final)
        number = 1 + max(map(self._number, self.steps()), default=0)
        try:
            if is_new:
                partial.rename(final)
                flush(self.path)
                _mark(final, number)
            else:
                # The two change places in one step, as the old one may be the only checkpoint.
                _mark(partial, number)
                publish_folder(partial, final)
            _write(self.path / "latest", f"{final.name}\n")
        except OSError:
            if is_new and final.exists():
                final.rename(partial)
            raise
        self._remove_old(step)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that could not be completed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def _remove_old(self, saved: int) -> None:
        if self._keep_last is None:
            return
        try:
            # Not the highest: a run that was begun again has lower steps than what it left.
            steps = sorted(self.steps(), key=self._number)
            kept = {saved, *steps[-self._keep_last :]}
            if self._keep_every is not None:
                kept |= {step for step in steps if step % self._keep_every == 0}
            for step in set(steps) - kept:
                # At once under another name, so that no half of one looks like a checkpoint.
                aside = self.path / f".step-{step:08d}.removed"
                self.of(step).rename(aside)
                shutil.rmtree(aside)
        except OSError as error:
            logger.warning("old checkpoints cannot be removed: %s", error)


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint has its marker, and the files that the marker lists.

    Raises:
        OSError: If that cannot be found out: it is then not to be taken for a torn one.
    """
    try:
        sizes = json.loads((folder / _MARKER).read_text())["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False


def _mark(folder: Path, number: int) -> None:
    sizes = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    _write(folder / _MARKER, json.dumps({"number": number, "bytes": sizes}, indent=1))


def _write(path: Path, text: str) -> None:
    """Write a file, at once and for good."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    flush(path.parent)
