"""A folder that appears complete or not at all, whatever happens while it is written."""

import ctypes
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def publish_folder(new: Path, final: Path) -> None:
    """Give a finished folder its final name, at once.

    Everything in it is flushed to disk first. A folder that has the name already is replaced: the
    two change names in one step where the system can (Linux 3.15, `renameat2`); elsewhere the old
    one is set aside under the name `.NAME.old` for a moment, and `restore_folder` is for what a kill
    leaves in that moment.

    Args:
        new: The finished folder, on the same file system as `final`.
        final: Its name from now on.
    """
    flush_folder(new)
    if not final.exists():
        new.rename(final)
        old = None
    elif _exchange(new, final):
        old = new
    else:
        old = _set_aside(final)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        new.rename(final)
    flush(final.parent)
    if old is not None:
        # The new one is in its place: what cannot be removed is in nobody's way.
        shutil.rmtree(old, ignore_errors=True)


def restore_folder(final: Path) -> None:
    """Give a folder its name back that `publish_folder` had set aside when it was killed."""
    old = _set_aside(final)
    if old.is_dir() and not final.exists():
        old.rename(final)
        flush(final.parent)


def carry_over(old: Path, new: Path, leave: Sequence[str]) -> None:
    """Put what a folder has and its successor has not into the successor, without moving anything.

    Args:
        old: The folder that will be replaced.
        new: The one that will replace it.
        leave: Patterns of the names of files that are not wanted any more.
    """
    for entry in old.iterdir():
        target = new / entry.name
        if target.exists() or any(entry.match(pattern) for pattern in leave):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no links
        shutil.copy2(source, target, follow_symlinks=False)


def _set_aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def flush_folder(folder: Path) -> None:
    """Flush the files in a folder, and all folders in it, to disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def flush(path: Path) -> None:
    """Flush one file, or the entries of one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change names in one step; return whether this system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # this file system cannot
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
