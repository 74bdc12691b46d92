"""What GPUs can do, from their makers' data sheets: dense bfloat16, and links to the next one."""

import difflib
from dataclasses import dataclass

from pp_recipe.options import OptionsError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    flops: float
    """Peak FLOPs per second in bfloat16, without sparsity."""
    memory: float
    """Bytes of memory."""
    bandwidth: float
    """Bytes per second to a neighbour, in one direction: NVLink, Infinity Fabric or PCIe."""


GPUS = {
    "a100": Gpu(312e12, 80e9, 300e9),
    "a100-40gb": Gpu(312e12, 40e9, 300e9),
    "h100": Gpu(989e12, 80e9, 450e9),
    "h200": Gpu(989e12, 141e9, 450e9),
    "b200": Gpu(2250e12, 180e9, 900e9),
    "l40s": Gpu(362e12, 48e9, 32e9),
    "rtx4090": Gpu(165e12, 24e9, 32e9),
    "mi300x": Gpu(1307e12, 192e9, 64e9),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, in any case, with or without `-`, `_` and spaces.

    Raises:
        OptionsError: If there is none.
    """

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    known = {plain(key): key for key in GPUS}
    if plain(name) in known:
        return GPUS[known[plain(name)]]
    near = [known[match] for match in difflib.get_close_matches(plain(name), known, n=2)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise OptionsError(
        [
            f"--gpu {name}: {hint}known: {', '.join(GPUS)}. For another one give --flops, "
            "--bandwidth and --memory"
        ]
    )
