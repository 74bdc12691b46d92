"""From what a user calls a checkpoint to a folder on this machine."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from pp_split_hf.safetensors_files import CheckpointError, find_files

_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
# The same weights once more, in the layout of their authors.
_NOT_WANTED = ["original/*", "consolidated*"]


def resolve_checkpoint(checkpoint: str | Path) -> Path:
    """Return the folder, or the file, of a checkpoint; every rank may call it at once.

    A path is taken as it is; a hub id is looked for in this machine's cache, then fetched. Ranks of
    one machine that fetch the same files wait for each other.

    Args:
        checkpoint: A folder, a safetensors file, or a hub id.

    Raises:
        CheckpointError: If it is none of them.
    """
    path = Path(checkpoint)
    if path.exists():
        return path
    try:
        try:
            folder = Path(snapshot_download(str(checkpoint), local_files_only=True))
            find_files(folder)  # the cache may have some of its files only
        except (LocalEntryNotFoundError, CheckpointError):
            folder = Path(
                snapshot_download(
                    str(checkpoint), allow_patterns=_WANTED, ignore_patterns=_NOT_WANTED
                )
            )
    except HFValidationError as error:
        raise CheckpointError(f"{checkpoint} is no folder and no file") from error
    except Exception as error:  # of the network, of the hub, of rights
        raise CheckpointError(
            f"{checkpoint} is neither a folder nor whole in this machine's cache of the hub, and "
            f"cannot be fetched: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    return folder
