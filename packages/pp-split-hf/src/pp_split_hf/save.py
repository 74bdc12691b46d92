"""All stages as one Hugging Face checkpoint, each rank writing what it has."""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pp_split_hf.all_or_none import AllOrNone
from pp_split_hf.prune import StagePart, stage_part
from pp_split_hf.publish import carry_over, flush, publish_folder, restore_folder
from pp_split_hf.stored_names import Units, kept_names, shapes, stored_units
from pp_split_hf.transformers_private import copy_custom_code, stored_form

# Files of weights of an earlier checkpoint, which go with it.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")

Tensors = dict[str, tuple[int, torch.Tensor]]
"""By name, the stage and the tensor."""


class Saveable(Protocol):
    """A tokenizer or a processor."""

    def save_pretrained(self, save_directory: Any) -> Any:
        """Write it into a folder."""


@dataclass
class _Shard:
    """One file of a checkpoint."""

    units: Units
    """Names of the model's tensors in it."""
    stored: dict[str, torch.Tensor]
    """What the file has, on the meta device."""

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.stored.values())


def save_pretrained_pipeline(
    parts: Sequence[nn.Module],
    path: str | Path,
    *,
    tokenizer: Saveable | None = None,
    max_shard_size: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
    is_writer: bool = True,
) -> None:
    """Write the stages of all ranks as one checkpoint that `from_pretrained` loads.

    Every rank writes safetensors files of its own tensors; nothing is gathered but names, and of a
    sharded tensor its shards, one tensor at a time. Names and tensors are those that
    `save_pretrained` writes: the conversions that loading made are turned round, and a tied weight
    is written once. The folder is complete or absent: it is written aside as `.NAME.partial`,
    flushed, and renamed; a checkpoint that has its name already is replaced at once. Whatever else
    its folder has (a tokenizer, a model card) stays.

    Every rank of `group` calls it, and all or none of them raise. `path` must be on a file system
    that all of them share.

    Args:
        parts: Modules of this rank's stages; see `split_model_into_stages`.
        path: The folder to write: a new one, an empty one, or that of an earlier checkpoint.
        tokenizer: Saved along; a processor as well.
        max_shard_size: The most bytes of tensors in a file, unless one layer alone is larger.
        group: The ranks that hold the stages; None means all ranks.
        is_writer: False on ranks whose stages are those of another rank too.

    Raises:
        RuntimeError: On every rank, if one could not write, or stages are missing. What was at
            `path` before is still there.
    """
    path = Path(path).resolve()
    partial = path.with_name(f".{path.name}.partial")
    ranks = AllOrNone(group)
    failure = f"{path} could not be written"
    # 1. Who writes what.
    with ranks.step(failure):
        if not isinstance(max_shard_size, int) or max_shard_size < 1:
            raise TypeError(
                f"max_shard_size={max_shard_size!r} must be a number of bytes, such as 5_000_000_000"
            )
        known = [_known(part) for part in parts]
        tensors = _own_tensors(parts)
        kinds = {name: (stage, *_kind(tensor)) for name, (stage, tensor) in tensors.items()}
    everyone = ranks.gather(kinds)
    with ranks.step(failure):
        _check_complete(known[0].skeleton, everyone)
        shards = _shards(known[0], tensors, everyone, max_shard_size)
    sizes = ranks.gather([(list(s.stored), s.num_bytes) for s in shards] if is_writer else [])
    first = sum(map(len, sizes[: ranks.rank]))
    names = _file_names(sum(map(len, sizes)))
    # 2. The files, aside.
    with ranks.step(failure):
        if ranks.rank == 0:
            restore_folder(path)
            _check_replaceable(path)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def clean_up() -> None:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)

    with ranks.step(failure, clean_up):
        if not partial.is_dir():
            raise FileNotFoundError("its folder is not on a file system that all ranks share")
    with ranks.step(failure, clean_up):
        files = [partial / name for name in names[first:]] if is_writer else None
        _write_shards(shards, files, tensors, known[0].skeleton)
        if ranks.rank == 0:
            index = [each for of_rank in sizes for each in of_rank]
            _write_index(partial, index, names, known[0].skeleton)
            _write_config(partial, known[0].skeleton, everyone)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            if path.is_dir():
                carry_over(path, partial, _WEIGHTS)
    # 3. At once in its place.
    with ranks.step(failure, clean_up):
        if ranks.rank == 0:
            publish_folder(partial, path)


def _known(module: nn.Module) -> StagePart:
    part = stage_part(module)
    if part is None:
        raise TypeError("parts must be modules that split_model_into_stages made")
    return part


def _own_tensors(parts: Sequence[nn.Module]) -> Tensors:
    """Return this rank's tensors that are stored, with the stage they are from."""
    if not parts:
        raise ValueError("there are no parts: every rank passes those of its own stages")
    wanted = set(kept_names(_known(parts[0]).skeleton))
    return {
        name: (_known(part).stage_index, tensor)
        for part in sorted(parts, key=lambda part: -_known(part).stage_index)
        for name, tensor in part.state_dict().items()
        if name in wanted
    }


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    if tensor.device.type == "meta":
        raise ValueError("the stages have parameters without values: they are on the meta device")
    return tuple(tensor.shape), tensor.dtype


def _check_complete(skeleton: nn.Module, everyone: Sequence[Mapping[str, Any]]) -> None:
    found = {name for names in everyone for name in names}
    missing = [name for name in kept_names(skeleton) if name not in found]
    if missing:
        raise ValueError(
            f"no rank has {len(missing)} of the model's tensors ({', '.join(missing[:10])}): every "
            "rank passes all of its stages"
        )


def _shards(
    part: StagePart, tensors: Tensors, everyone: Sequence[Mapping[str, Any]], limit: int
) -> list[_Shard]:
    """Divide what the stages of this rank store among files."""
    # A table that several stages have is stored by the first of them.
    first_stage: dict[str, int] = {}
    kinds: dict[str, torch.Tensor] = {}
    for names in everyone:
        for name, (stage, shape, dtype) in names.items():
            first_stage[name] = min(stage, first_stage.get(name, stage))
            kinds[name] = torch.empty(shape, dtype=dtype, device="meta")
    own = {name: kinds[name] for name in tensors if tensors[name][0] == first_stage[name]}
    units = stored_units(part.skeleton, part.layout, own)
    whole = shapes([stored_form(part.skeleton, kinds)])
    mine = shapes(form for _, form in units)
    if apart := sorted(name for name, shape in mine.items() if whole.get(name) != shape):
        raise ValueError(
            f"{', '.join(apart[:10])} are stored as one with tensors of other stages: cut the model "
            "elsewhere, or save from fewer stages"
        )
    shards: list[_Shard] = []
    for unit, form in units:
        size = sum(tensor.nbytes for tensor in form.values())
        if not shards or shards[-1].num_bytes + size > limit:
            shards.append(_Shard([], {}))
        shards[-1].units.append(unit)
        shards[-1].stored.update(form)
    return shards


def _check_replaceable(path: Path) -> None:
    """Refuse to write into a folder of something else."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError("there is a file of that name")
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    if any(path.iterdir()) and not any((path / name).is_file() for name in weights):
        raise FileExistsError("there is a folder of that name that is no checkpoint, and not empty")


def _write_shards(
    shards: Sequence[_Shard], files: Sequence[Path] | None, tensors: Tensors, skeleton: nn.Module
) -> None:
    """Write a file per shard; without files only help to bring sharded tensors together.

    A rank that has failed goes on helping, as the ranks that have the other shards of its tensors
    wait for it.
    """
    errors: list[Exception] = []
    for number, shard in enumerate(shards):
        content: dict[str, torch.Tensor] = {}
        for unit in shard.units:
            whole = {}
            for name in unit:
                tensor = tensors[name][1]
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if files is not None and not errors:
                    whole[name] = tensor.cpu()
            with _noted(errors):
                content.update(stored_form(skeleton, whole))
        if files is not None and not errors:
            with _noted(errors):
                _write(files[number], content)
    if errors:
        raise errors[0]


@contextmanager
def _noted(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)


def _write(file: Path, content: dict[str, torch.Tensor]) -> None:
    file.touch()
    mode = file.stat().st_mode
    taken: set[int] = set()
    for name, tensor in content.items():
        tensor = tensor.contiguous()
        # A file has no aliases, as a tie made by hand would be.
        content[name] = tensor.clone() if tensor.data_ptr() in taken else tensor
        taken.add(tensor.data_ptr())
    save_file(content, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors makes files that their owner alone can read
    flush(file)


def _file_names(number: int) -> list[str]:
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]


def _write_index(
    folder: Path,
    shards: Sequence[tuple[list[str], int]],
    names: Sequence[str],
    skeleton: nn.Module,
) -> None:
    if len(shards) == 1:
        return
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    weight_map = {
        stored: file for (several, _), file in zip(shards, names, strict=True) for stored in several
    }
    index = {
        "metadata": {
            "total_parameters": parameters,
            "total_size": sum(num_bytes for _, num_bytes in shards),
        },
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text)


def _write_config(folder: Path, skeleton: nn.Module, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Write everything beside the weights, as `save_pretrained` does (Transformers 5.24)."""
    if not isinstance(skeleton, PreTrainedModel):
        return
    config = copy.deepcopy(skeleton.config)
    found = {name: dtype for names in everyone for name, (_, _, dtype) in names.items()}
    dtypes = [found[name] for name, _ in skeleton.named_parameters() if name in found]
    if first := next((dtype for dtype in dtypes if dtype.is_floating_point), None):
        config.dtype = str(first).removeprefix("torch.")
    config.architectures = [type(skeleton).__name__]
    copy_custom_code(skeleton, folder, config)
    config.save_pretrained(folder)
    if skeleton.can_generate() and skeleton.generation_config is not None:
        skeleton.generation_config.save_pretrained(folder)
