"""Every private name of Transformers that this package uses, read against 5.24."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from transformers import modeling_flash_attention_utils
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES


def plan_of(part: nn.Module, kind: Literal["tp_plan", "ep_plan", "fsdp_plan"]) -> dict[str, str]:
    """Return a model's own plan, `*` standing for layer numbers; empty if it has none."""
    return dict(getattr(part, kind, None) or {})


def expand_plan(part: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan by the names of modules and parameters, in the order of the model."""
    expand = getattr(part, "_expand_parallel_plan")  # noqa: B009
    expanded: dict[str, str] = expand(dict(plan))
    return expanded


def style_names() -> list[str]:
    """Return the names of the parallel styles."""
    return list(ALL_PARALLEL_STYLES.keys())


def set_attention(config: Any, name: str) -> None:
    """Set a config's attention function by its registered name, without asking what it is."""
    config._attn_implementation_internal = name


def take_no_batch_for_packed() -> None:
    """Have no batch of this process taken for a packed one."""
    modeling_flash_attention_utils._is_packed_sequence = lambda *args, **kwargs: False
