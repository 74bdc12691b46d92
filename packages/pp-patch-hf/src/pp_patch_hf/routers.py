"""What the routers of one stage contribute to the auxiliary loss of the whole model."""

from typing import Any

import torch
from torch import nn

from pp_split_hf import RouterLoss, router_modules


class RouterSums:
    """Gathers the sums of a stage's routers while its forward runs.

    Args:
        model: The stage's module.
        loss: The loss that the sums are for.
    """

    def __init__(self, model: nn.Module, loss: RouterLoss) -> None:
        self.loss = loss
        self.last: torch.Tensor | None = None
        self._logits: list[torch.Tensor] = []
        self._running = False
        self._handles = [
            module.register_forward_hook(self._noting(index))
            for module, index in router_modules(model)
        ]

    def start(self) -> None:
        """Begin a forward."""
        self._logits, self._running = [], True

    def finish(
        self,
        received: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        device: torch.device,
    ) -> torch.Tensor:
        """End the forward; return the sums of all stages up to this one.

        Args:
            received: The sums of the stages before; None on the first.
            attention_mask: Of the microbatch.
            device: Where the sums are to be if there are none.
        """
        logits, self._logits, self._running = self._logits, [], False
        total = received
        if total is None:
            total = torch.zeros(2 * self.loss.num_experts + 1, device=device)
        return total + self.loss.sums(logits, attention_mask) if logits else total

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _noting(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # A forward that is run again for its activations has been counted already.
            if self._running:
                self._logits.append(output[index] if isinstance(output, tuple | list) else output)

        return hook
