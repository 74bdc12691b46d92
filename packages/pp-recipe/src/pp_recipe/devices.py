"""Which device the ranks use, and how many ranks that allows."""

import os
from dataclasses import replace

from pp_recipe.options import OptionsError, TrainOptions


def settle_device(options: TrainOptions) -> TrainOptions:
    """Return the options with `device` and `nproc_per_node` settled for this machine.

    Raises:
        OptionsError: If CUDA is asked for and the GPUs do not suffice.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = options.device or ("cuda" if gpus else "cpu")
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc_per_node or 0))
    if device == "cpu":
        return replace(options, device="cpu", nproc_per_node=wanted or 2)
    if not gpus:
        raise OptionsError(["--device cuda: torch finds no GPU here; use --device cpu"])
    if wanted > gpus:
        raise OptionsError(
            [
                f"--nproc-per-node {wanted} needs {wanted} GPUs, and this machine has {gpus}: "
                f"use at most {gpus}, or --device cpu"
            ]
        )
    return replace(options, device="cuda", nproc_per_node=wanted or min(2, gpus))
