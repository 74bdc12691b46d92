"""Split backwards that lose no gradient: in one piece where they must be, and with no aliases."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

logger = logging.getLogger(__name__)

_DONE = "_pp_exact_split"


def make_split_backward_exact(stage: PipelineStage) -> None:
    """Have a stage of a schedule that splits backwards give the gradients of a whole backward.

    Two faults of torch (2.13 to 2.15) that give no error, and one that does:

    - The weight half begins where the paths from the output to the weights leave those to the
      input. An input that needs no gradient, as after stages that are frozen, has no such path, and
      neither has one that the stage itself detaches; and what FSDP has given up after the forward
      is another weight by then. Gradients are None or incomplete. Here the input half runs the
      whole backward where it is so, which is seen at the stage's forward, once per combination of
      inputs and outputs that need gradients.
    - A first gradient is assigned as it comes, be it a received tensor or another weight's, and
      later ones are added to it in place. Here it becomes a tensor of its own.
    - An output that is a view cannot be detached where torch detaches it. Here it is copied.

    It concerns this object alone.
    """
    if stage.is_first or stage.dw_builder is not None:
        return  # torch keeps the first stage's backward whole; who has a builder knows better
    if _DONE in vars(stage):
        return  # for another schedule
    vars(stage)[_DONE] = True
    _own_gradients(stage)
    forward = stage.forward_maybe_with_nosync
    seen: set[tuple[bool, ...]] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        gathered = [] if seen else list(map(id, stage.submod.parameters()))
        output = _without_views(forward(*args, **kwargs))
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(output))
        key = tuple(tensor.requires_grad for tensor in (*inputs, *outputs))
        if key not in seen:
            given_up = not seen and gathered != list(map(id, stage.submod.parameters()))
            seen.add(key)
            if given_up:
                logger.warning(
                    "FSDP gives up stage %s's weights after its forward, so its backward is not "
                    "split: shard it with reshard_after_forward=False for a zero-bubble schedule",
                    stage.stage_index,
                )
            if given_up or not _all_depend(outputs, inputs):
                stage.dw_builder = lambda: lambda *args: None
        return output

    vars(stage)["forward_maybe_with_nosync"] = run


def _own_gradients(stage: PipelineStage) -> None:
    weight_half = stage.backward_weight_one_chunk

    def run(*args: Any, **kwargs: Any) -> Any:
        first = [p for p in stage.submod.parameters() if p.requires_grad and p.grad is None]
        weight_half(*args, **kwargs)
        if stage.dw_builder is None:
            for parameter in first:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    vars(stage)["backward_weight_one_chunk"] = run


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _without_views(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.requires_grad and value._is_view() else value
    if type(value) in (tuple, list):
        return type(value)(map(_without_views, value))
    return value


def _all_depend(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> bool:
    """Whether a path leads from each output that needs a gradient to an input that does."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    starts = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    return all(_reaches(start, ends) for start in starts)


def _reaches(start: Node, ends: set[Node]) -> bool:
    seen, stack = {start}, [start]
    while stack:
        node = stack.pop()
        if node in ends:
            return True
        following = {node for node, _ in node.next_functions if node is not None} - seen
        seen |= following
        stack += following
    return False
