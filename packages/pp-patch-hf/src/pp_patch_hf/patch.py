"""The forward of a stage: stage tensors in, stage tensors out, the architecture's own code between."""

from typing import Any

import torch
from torch import nn

from pp_patch_hf.boundary import Boundary, Gate, place_gates, remove_gate
from pp_patch_hf.routers import RouterSums
from pp_split_hf import (
    Sizes,
    StagePart,
    accepts,
    find_layout,
    main_output,
    skeleton_of,
    stage_part,
)

_FIRST_STAGE_ONLY = frozenset({"pixel_values", "pixel_values_videos", "image_sizes"})


class PipelinePatch:
    """A patch that is in place; `remove` takes it off."""

    def __init__(
        self,
        patched: list[nn.Module],
        gated: list[nn.Module],
        routers: RouterSums | None = None,
    ) -> None:
        self._patched = patched
        self._gated = gated
        self._routers = routers

    def take_auxiliary_loss(self) -> torch.Tensor | None:
        """Return the routers' loss of the forward that ran last, times its coefficient.

        On the last stage of a model whose config has `output_router_logits=True`, else None. It is
        to be added to the loss of that microbatch; it can be taken once.
        """
        if self._routers is None or self._routers.last is None:
            return None
        sums, self._routers.last = self._routers.last, None
        return self._routers.loss.coefficient * self._routers.loss.loss(sums)

    def remove(self) -> None:
        """Give the model its own forward back."""
        for module in self._patched:
            del module.forward
        for module in self._gated:
            remove_gate(module)
        if self._routers is not None:
            self._routers.remove()
        self._patched, self._gated, self._routers = [], [], None


def patch_hf_model_for_pp(
    model: nn.Module, patch_inner_model: bool = True, patch_causal_lm_model: bool = True
) -> PipelinePatch:
    """Make a pruned Hugging Face model take and return stage tensors.

    The architecture's own forward still runs, from its embedding (zeros, where the embedding is on
    another stage) to its head: masks, rotary tables, scalings and soft caps are made by its own
    code on every stage, from the same `input_ids`, `attention_mask`, `position_ids`. Only what
    enters the first own layer is replaced by what was received.

    The patched forward is `forward(*stage_inputs, input_ids=None, **kwargs)`:

    - first stage: the one stage input is the token ids `[B, S]`;
    - later stages: the stage inputs are what the stage before returned; `input_ids` should be
      passed by keyword, since some architectures read them deep inside, and a classifier of
      sequences finds each row's last token by them (zeros stand in for them);
      images are ignored, as the vision tower is on the first stage;
    - the last stage returns logits (the last hidden states for a model without a head; for question
      answering those of start and end as one tensor `[B, S, 2]`), every other stage hidden states:
      one tensor, or a tuple that begins with them where the architecture's layers take more from
      earlier ones.

    Patch after activation checkpointing is applied, so that the boundary stays outside of what is
    run again.

    Args:
        model: A module from `split_model_into_stages`, or a whole model, which then is its own
            first and last stage.
        patch_inner_model: Handle the boundary inside the decoder. False says that the decoder
            itself takes and returns stage tensors.
        patch_causal_lm_model: Have the outermost module return a tensor. False leaves its forward
            alone; then, with `patch_inner_model`, the decoder takes and returns stage tensors.

    Returns:
        The patch, to be taken off again with `remove()`.

    Raises:
        ValueError: If the model is patched already.
    """
    part = stage_part(model) or _whole(model)
    decoder = model.get_submodule(part.layout.layers.rpartition(".")[0])
    inner_is_outer = decoder is model
    targets = [decoder] if patch_inner_model and not patch_causal_lm_model else [model]
    if not patch_inner_model and not patch_causal_lm_model:
        return PipelinePatch([], [])
    if not patch_inner_model and inner_is_outer:
        return PipelinePatch([], [])
    layers = model.get_submodule(part.layout.layers)
    assert isinstance(layers, nn.ModuleList)
    if any("forward" in vars(m) for m in (model, decoder)) or any(
        isinstance(layer, Gate) for layer in layers
    ):
        raise ValueError(f"{type(model).__name__} is patched already; remove that patch first")

    boundary = Boundary(part) if patch_inner_model else None
    gated: list[nn.Module] = []
    if boundary is not None:
        gated = place_gates(model, part, boundary)
    routers = None
    if boundary is not None and part.layout.router is not None:
        routers = RouterSums(model, part.layout.router)
    for target in targets:
        forward = _StageForward(target.forward, part, boundary, routers)
        object.__setattr__(target, "forward", forward)
    return PipelinePatch(targets, gated, routers)


class _StageForward:
    """The forward of a patched module."""

    def __init__(
        self,
        own_forward: Any,
        part: StagePart,
        boundary: Boundary | None,
        routers: RouterSums | None,
    ) -> None:
        self.own_forward = own_forward
        self.part = part
        self.boundary = boundary
        self.routers = routers
        # A cache would only cost memory, and most configs ask for one.
        self.without_cache = accepts(own_forward, "use_cache")

    def __call__(
        self,
        *stage_inputs: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not stage_inputs and input_ids is not None:
            # A decoder is given it by its model, and by keyword.
            stage_inputs, input_ids = (input_ids,), None
        if not stage_inputs:
            raise TypeError("a stage needs its input: token ids, or the hidden states received")
        if not self.part.is_first:  # the encoders that take them are on the first
            kwargs = {n: value for n, value in kwargs.items() if n not in _FIRST_STAGE_ONLY}
        if self.without_cache:
            kwargs["use_cache"] = False
        ids = stage_inputs[0] if self.part.is_first else self._placeholder_ids(stage_inputs[0])
        sizes = self.part.sizes
        sizes.batch_size, sizes.seq_len, sizes.device = ids.shape[0], ids.shape[1], ids.device
        if self.boundary is None:
            return main_output(self.own_forward(*stage_inputs, **kwargs))
        if self.part.is_first or input_ids is None:
            input_ids = ids
        self.boundary.start(() if self.part.is_first else stage_inputs)
        if self.routers is not None:
            self.routers.start()
            kwargs["output_router_logits"] = False  # it sees but this stage's
        try:
            output = self.own_forward(input_ids=input_ids, **kwargs)
            if self.routers is not None:
                self._sum_routers(self.routers, kwargs.get("attention_mask"), ids.device)
        finally:
            outgoing = self.boundary.finish()
        return main_output(output) if self.part.is_last else self.boundary.output(outgoing)

    def _sum_routers(
        self, routers: RouterSums, attention_mask: torch.Tensor | None, device: torch.device
    ) -> None:
        """The sums are the last of what is received and sent; the last stage makes a loss of them."""
        boundary = self.boundary
        assert boundary is not None
        received = boundary.receive(len(boundary.incoming) - 1) if boundary.incoming else None
        sums = routers.finish(received, attention_mask, device)
        if boundary.sent is None:
            routers.last = sums
        else:
            boundary.keep(len(boundary.sent.slots) - 1, sums)

    def _placeholder_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        crossing = self.part.layout.trace.crossings[self.part.first_layer]
        batch_size, seq_len = crossing.slots[0].shape.batch_and_seq(hidden.shape)
        return torch.zeros((batch_size, seq_len), dtype=torch.long, device=hidden.device)


def _whole(model: nn.Module) -> StagePart:
    layout = find_layout(model)
    return StagePart(0, 1, 0, layout.num_layers, layout, Sizes(), skeleton_of(model))
