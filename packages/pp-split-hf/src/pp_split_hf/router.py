"""The auxiliary loss of routers, which a model computes over all of its layers at once.

Mixtures of experts are trained with a loss that multiplies, expert by expert, the share of tokens
that all layers sent to it with the mean probability that all layers gave it (Switch Transformer,
equations 4 to 6; `load_balancing_loss_func` in Transformers 5.23). Losses of single stages do not
add up to it, but its three sums do: how often each expert was chosen, the probabilities, and the
number of tokens. They travel from stage to stage, and the last one makes the loss of them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pp_split_hf.shapes import BoundaryShape, Dim

_NAMES = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k", "moe_k", "num_experts_per_token"),
    "coefficient": ("router_aux_loss_coef", "aux_loss_coef"),
}


@dataclass(frozen=True)
class RouterLoss:
    """The routers' auxiliary loss of a model."""

    num_experts: int
    """Experts of a layer."""
    top_k: int
    """How many of them a token is sent to."""
    coefficient: float
    """What the loss is multiplied with before it is added."""

    @property
    def shape(self) -> BoundaryShape:
        """The shape of the sums."""
        return BoundaryShape((Dim(2 * self.num_experts + 1, 0, False),), torch.float32)

    def sums(
        self, logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the layers of one stage add.

        Args:
            logits: `[rows * length, num_experts]` of each of its routers; at least one.
            attention_mask: `[rows, length]`; tokens where it is 0 do not count.

        Returns:
            float32 `[2 * num_experts + 1]`: choices and probabilities per expert, and tokens.
        """
        total = torch.zeros(2 * self.num_experts + 1, device=logits[0].device)
        for each in logits:
            probabilities = each.flatten(0, -2).softmax(-1)
            weights = probabilities.new_ones(len(probabilities), dtype=torch.float32)
            if attention_mask is not None:
                weights = attention_mask.reshape(-1).to(weights)
            chosen = probabilities.topk(self.top_k, dim=-1).indices
            counts = torch.zeros(self.num_experts, device=weights.device).scatter_add_(
                0, chosen.reshape(-1), weights.repeat_interleave(self.top_k)
            )
            weighted = (probabilities.float() * weights[:, None]).sum(0)
            total = total + torch.cat([counts, weighted, weights.sum()[None]])
        return total

    def loss(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the loss, without its coefficient, from the sums over all layers."""
        counts, probabilities, tokens = sums.split([self.num_experts, self.num_experts, 1])
        product: torch.Tensor = (counts / tokens * (probabilities / tokens)).sum()
        return product * self.num_experts


def find_router_loss(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that a model's config asks for with `output_router_logits=True`.

    Raises:
        ValueError: If it asks for one that is not computed as others compute it.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    if not getattr(config, "output_router_logits", False):
        return None
    theirs = _own_function(model)
    if theirs is None:  # it shows its routers' logits and makes no loss of them
        return None
    name = type(model).__name__
    values = {field: _first_of(names, model, config) for field, names in _NAMES.items()}
    missing = [" or ".join(_NAMES[field]) for field, value in values.items() if value is None]
    if missing or not router_modules(model):
        raise ValueError(
            f"{name} has config.output_router_logits=True, but how its routers' loss is computed "
            f"is not known (missing: {', '.join(missing) or 'its routers'}): set "
            "output_router_logits=False to train without it"
        )
    ours = RouterLoss(**values)
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn((6, ours.num_experts), generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for each in (None, mask):
        wanted = theirs(logits, ours.num_experts, ours.top_k, each)
        if not torch.allclose(ours.loss(ours.sums(logits, each)), torch.as_tensor(wanted)):
            raise ValueError(
                f"{name} computes its routers' loss in a way of its own, which stages cannot: set "
                "config.output_router_logits=False to train without it"
            )
    return ours


def router_modules(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return a model's routers, and which of their outputs the logits are, as Transformers has it.

    Stand-ins for layers of other stages have none.
    """
    found: dict[int, tuple[nn.Module, int]] = {}
    for owner in model.modules():
        recorders = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        if recorders is None:
            continue
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target: Any = getattr(recorder, "target_class", recorder)
            suffix = getattr(recorder, "layer_name", None)
            for name, module in owner.named_modules():
                if isinstance(module, target) and (suffix is None or suffix in name):
                    found[id(module)] = (module, getattr(recorder, "index", 0))
    return list(found.values())


def _first_of(names: Sequence[str], *holders: Any) -> Any:
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in found if value is not None), None)


def _own_function(model: nn.Module) -> Any:
    for cls in type(model).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "load_balancing_loss_func", None)
        if function is not None:
            return function
    return None
