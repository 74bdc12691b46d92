"""Context parallelism by Ulysses: ranks share the sequence, and within attention the heads."""

import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pp_autopipeline import transformers_private
from pp_autopipeline.checks import refuse
from pp_autopipeline.parallelize.sequence_parallel import Sequence, wrap_hidden_states
from pp_autopipeline.parallelize.shared_gradients import scale_gradients
from pp_split_hf import stage_part

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_PER_HEAD = ("s_aux", "position_bias")
"""What attention functions take that has one value per head, and is not cut here."""


def apply_cp(part: nn.Module, mesh: DeviceMesh, experts: list[nn.Module], heads_share: int) -> None:
    """Have ranks share the sequence of a stage's layers.

    Every rank of the axis is given the same batch. Between the first layer of the stage and the
    last each has its tokens alone, so that activations are shared, and norms, projections and MLPs
    too; within attention, where tokens meet, each has all tokens and a share of the heads (DeepSpeed
    Ulysses, arXiv 2309.14509). Masks stay whole, so padding, windows and packed rows work as
    without. Any length will do, also one that the ranks do not divide.

    Gradients of the layers' weights cover a rank's own tokens; they are multiplied by the number of
    ranks, over which data parallelism averages them.

    Args:
        part: The stage's module.
        mesh: The context-parallel axis.
        experts: Modules that expert parallelism has spread; they see the tokens of all ranks.
        heads_share: By how much tensor parallelism has divided the heads.

    Raises:
        ValueError: Naming everything of the model that keeps it from this.
    """
    size = mesh.size()
    refuse(
        f"context parallelism over {size} ranks is impossible",
        _problems(part, size, heads_share),
    )
    stage = stage_part(part)
    assert stage is not None
    layers = [part.get_submodule(name) for name in stage.layout.layer_fqns]
    owned = [layer for layer in layers if any(True for _ in layer.parameters())]
    if not owned:
        return
    sequence = Sequence(mesh)
    spread = set(experts)
    for layer in owned:
        for module in list(layer.modules()):
            if module not in spread and any(True for _ in module.parameters(recurse=False)):
                scale_gradients(module, float(size))
            if _is_attention(module):
                _share_heads(module, sequence)
        _cut_keywords(layer, sequence)
    wrap_hidden_states(owned[0], sequence.scatter, None)
    wrap_hidden_states(owned[-1], None, sequence.gather)


def _problems(part: nn.Module, size: int, heads_share: int) -> list[str]:
    problems = []
    config: Any = part.config
    config = config.get_text_config()
    name = type(part).__name__
    if not getattr(part, "_supports_attention_backend", False):
        problems.append(f"{name} has an attention of its own, which cannot be told to share heads")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if other:
        problems.append(
            f"{name} has layers in which tokens meet otherwise than in attention: {other}"
        )
    if getattr(config, "output_router_logits", False):
        problems.append("output_router_logits=True needs the router of every token on each rank")
    sinks = [n for n, _ in part.named_parameters() if n.endswith(".sinks")]
    if sinks:
        problems.append(f"{name} has sinks, one per head ({sinks[0]}, ...), which are not cut")
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % (size * heads_share):
            by = f" x tp_size={heads_share}" if heads_share > 1 else ""
            problems.append(
                f"{attribute}={heads} is not a multiple of cp_size={size}{by}: choose factors of it"
            )
    return problems


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(module, "config")


def _share_heads(module: nn.Module, sequence: Sequence) -> None:
    """Have an attention module call its attention function with all tokens of some heads."""
    # The model's own config decides about masks, which stay as they are.
    config: Any = copy(module.config)
    name = config._attn_implementation
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)

    def run(
        attention: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        whole = (_to_heads(tensor, sequence) for tensor in (query, key, value))
        per_head = [name for name in _PER_HEAD if kwargs.get(name) is not None]
        if per_head:
            raise ValueError(
                f"context parallelism does not cut {per_head} of {type(attention).__name__}: set "
                "cp_size=1"
            )
        output, weights = attend(attention, *whole, *args, **kwargs)
        return _to_tokens(output, sequence), weights

    known = f"{name} over {id(sequence)}"
    ALL_ATTENTION_FUNCTIONS.register(known, run)
    transformers_private.set_attention(config, known)
    object.__setattr__(module, "config", config)


def _to_heads(mine: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """From [rows, heads, own tokens, size] to [rows, own heads, tokens, size]."""
    rows, heads, _, size = mine.shape
    return _reshard(mine, sequence, (rows, heads, sequence.length, size), 2, 1)


def _to_tokens(mine: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """From [rows, tokens, own heads, size] to [rows, own tokens, heads, size]."""
    rows, tokens, heads, size = mine.shape
    return _reshard(mine, sequence, (rows, tokens, heads * sequence.mesh.size(), size), 2, 1)


def _reshard(
    mine: torch.Tensor, sequence: Sequence, shape: tuple[int, ...], dim: int, to_dim: int
) -> torch.Tensor:
    stride = torch.empty(shape, device="meta").stride()
    spread = DTensor.from_local(
        mine.contiguous(),
        sequence.mesh,
        [Shard(dim)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    return spread.redistribute(placements=[Shard(to_dim)]).to_local()


def _cut_keywords(layer: nn.Module, sequence: Sequence) -> None:
    """Have a layer get its own tokens' share of what comes beside the hidden states."""
    forward = layer.forward

    def cut(name: str, value: Any) -> Any:
        if "mask" in name:
            return value
        if isinstance(value, tuple | list):
            return type(value)(cut(name, each) for each in value)
        is_by_token = (
            isinstance(value, torch.Tensor)
            and value.ndim >= 2
            and value.shape[1] == sequence.length
        )
        return sequence.scatter(value) if is_by_token else value

    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(cut("", each) for each in args)
        kwargs = {
            name: value if name == "hidden_states" else cut(name, value)
            for name, value in kwargs.items()
        }
        return forward(hidden_states, *args, **kwargs)

    object.__setattr__(layer, "forward", run)
