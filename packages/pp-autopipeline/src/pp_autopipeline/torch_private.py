"""Every torch-private name that this package uses, read against torch 2.13.0 and 2.15.0."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was cut from, or the mesh itself."""
    return mesh._get_root_mesh()


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Rows in groups, each times a matrix of its own; or, for gradients, groups of inner rows."""
    return 2 * prod(a) * b[-1]


def _attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dropout: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> int:
    return _seen(sdpa_flop_count(query, key, value), query[2], is_causal)


def _attention_backward_flops(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    out: Sequence[int],
    logsumexp: Sequence[int],
    dropout: float,
    is_causal: bool,
    **kwargs: Any,
) -> int:
    flops = sdpa_backward_flop_count(gradient, query, key, value)
    return _seen(flops, query[2], is_causal)


def _seen(flops: int, length: int, is_causal: bool) -> int:
    """What is left where each token looks at itself and at those before it alone."""
    return flops * (length + 1) // (2 * length) if is_causal else flops


class _NoModules:
    """In the place of the counter's tracker of modules: what is counted is counted once, for all.

    Its hooks forbid `torch.autograd.grad` within a forward.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of FLOPs, corrected (2.13 to 2.15) and without its count by module.

    It knows no grouped products of matrices, of which mixtures of experts are made, and counts
    causal attention as if it were not; the kernels leave out what the flag `is_causal` hides.
    """
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten._grouped_mm: _grouped_mm_flops,
            attention: _attention_flops,
            attention_backward: _attention_backward_flops,
        },
    )
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return axes of a mesh as one, joining them unless a mesh of these ranks is there."""
    root = root_mesh(mesh)
    wanted = root[axes].mesh.flatten().tolist()
    for name, known in root._get_root_mesh()._flatten_mapping.items():
        if known.ndim == 1 and known.mesh.flatten().tolist() == wanted and "_".join(axes) == name:
            return known
    return root[axes]._flatten("_".join(axes))


def overlap_tensor_parallel(mesh: DeviceMesh) -> None:
    """Have inductor overlap tensor-parallel communication with computation, for CUDA devices."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
