"""The safetensors files of a checkpoint: what is in them, and their bytes as mapped memory."""

import json
import math
import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_HEADER_LIMIT = 100_000_000  # as the safetensors library has it
_KEPT = 8 << 20  # bytes that may stay in the process's memory after they were copied
_AHEAD = 64 << 20  # bytes that the system is asked to read before they are touched
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """What is wrong with the files of a checkpoint, a line per problem."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a checkpoint has a tensor."""

    file: Path
    """The file."""
    begin: int
    """Its first byte in the file."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def find_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face checkpoint; only their names are looked at.

    Args:
        folder: A folder with `model.safetensors` or `model.safetensors.index.json`, or one file.

    Raises:
        CheckpointError: If there are none, or not all that the index names.
    """
    if folder.is_file():
        return [folder]
    single = folder / "model.safetensors"
    if single.is_file():  # before an index, which an earlier save may have left
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is no index of a checkpoint: {error!r}") from error
        if absent := [name for name in names if not (folder / name).is_file()]:
            shown = ", ".join(absent[:10])
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the {len(names)} files that {index.name} names: "
                f"{shown}"
            )
        return [folder / name for name in names]
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in pickles (pytorch_model*.bin), which cannot be read in "
            "part: load the model once with from_pretrained and save it again with save_pretrained"
        )
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json"
    )


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Return all tensors in the files by name; only the headers are read.

    Raises:
        CheckpointError: Listing every file that is no safetensors file or that ends too early, and
            every name that is in two files.
    """
    found: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        try:
            for name, stored in _read_header(file):
                if name in found:
                    problems.append(f"{name} is in {found[name].file.name} and in {file.name}")
                found[name] = stored
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return found


def _read_header(file: Path) -> list[tuple[str, StoredTensor]]:
    try:
        return list(_entries(file))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file} has a header that is none: {error!r}") from error


def _entries(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{file} is no safetensors file, or cut off in its header")
        raw = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file} has a header that is no JSON: {error}") from error
    header.pop("__metadata__", None)
    start = 8 + length
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise CheckpointError(f"{file} is cut off: it has {size} bytes and must have {end}")
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{name} in {file} has dtype {entry['dtype']}, which is not read")
        dtype, (begin, stop) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        stored = StoredTensor(file, start + begin, tuple(entry["shape"]), dtype)
        if stored.num_bytes != stop - begin:
            raise CheckpointError(
                f"{name} in {file} has shape {list(stored.shape)} and {stop - begin} bytes"
            )
        yield name, stored


class MappedFiles:
    """Tensors that are the files' own bytes, read when they are touched.

    What has been copied is to be released, or the pages of the files stay in the memory of the
    process beside the copies.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._wanted: deque[StoredTensor] = deque()
        self._asked = 0
        self._done = 0

    def read_ahead(self, wanted: Iterable[StoredTensor]) -> None:
        """Say what will be touched, in order: the system reads on while copies are made.

        Without it each page waits for the disk: two processes took twice as long for the same files
        (Linux 6.18).
        """
        self._wanted = deque(wanted)
        self._asked = 0
        self._ask()

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a stored tensor on the CPU; writing to it never reaches the file."""
        if stored.num_bytes == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        mapped = self._map(stored.file)
        flat = torch.frombuffer(
            mapped, dtype=stored.dtype, count=math.prod(stored.shape), offset=stored.begin
        )
        return flat.view(stored.shape)

    def release(self, stored: StoredTensor, num_bytes: int | None = None) -> None:
        """Say that `num_bytes` of a tensor, or all, are done with: their pages may go.

        When enough has come together, all pages of the files go: with each that is touched the
        system maps some around it, of tensors that were released before.
        """
        done = stored.num_bytes if num_bytes is None else num_bytes
        self._done += done
        self._asked -= done
        if self._done >= _KEPT:
            self._done = 0
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
        self._ask()

    def _ask(self) -> None:
        while self._wanted and self._asked < _AHEAD:
            stored = self._wanted.popleft()
            first = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
            length = stored.begin + stored.num_bytes - first
            if stored.num_bytes:
                self._map(stored.file).madvise(mmap.MADV_WILLNEED, first, length)
                self._asked += stored.num_bytes

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                # Private: torch wants memory that could be written to.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]
