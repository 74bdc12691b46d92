"""What a pool puts in the place of one stage's own methods, on that object alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from pp_bufferpool import torch_private
from pp_bufferpool.lifetimes import Direction
from pp_bufferpool.shelf import Shelf
from pp_bufferpool.slots import Layout

_MARK = "_pp_recv_buffer_pool"


def has_pool(stage: PipelineStage) -> bool:
    """Whether a pool is installed on a stage."""
    return _MARK in vars(stage)


class StageMethods:
    """A stage's receives in the slots of a shelf.

    Installed at once; each method does what torch's does, or what somebody else had put there.

    Args:
        stage: The stage to act on.
        shelf: The slots of its rank.
        schedule: Whose losses are let go of.
    """

    def __init__(
        self, stage: PipelineStage, shelf: Shelf, schedule: torch_private.Schedule
    ) -> None:
        self._stage, self._shelf, self._schedule = stage, shelf, schedule
        self._posted: dict[tuple[Direction, int], list[Any]] = {}
        self._losses: dict[int, torch.Tensor] = {}
        ours = (
            self._set_up_forward, self._set_up_backward, self._post_forward, self._post_backward,
            self._take_forward, self._take_backward, self._take_local_gradients,
            self._run_forward, self._run_backward, self._run_weight_backward,
        )  # fmt: skip
        self._ours: Mapping[str, Any] = dict(zip(torch_private.STAGE_METHODS, ours, strict=True))
        self._before = {name: vars(stage)[name] for name in self._ours if name in vars(stage)}
        self._wrapped = {name: getattr(stage, name) for name in self._ours}
        vars(stage)[_MARK] = True
        vars(stage).update(self._ours)
        self._describe("forward", torch_private.forward_infos(stage))
        self._describe("backward", torch_private.backward_infos(stage))

    @staticmethod
    def is_between_steps(stage: PipelineStage) -> bool:
        """Whether no receive of a stage is under way, as far as its torch knows."""
        if torch_private.PREALLOCATES:
            return True
        infos_of = (torch_private.forward_infos(stage), torch_private.backward_infos(stage))
        return not any(torch_private.have_buffers(i) for of in infos_of for i in of.values())

    def wrapped_since(self) -> list[str]:
        """Return the methods that others have replaced in the meantime."""
        found = vars(self._stage)
        return [name for name, method in self._ours.items() if found.get(name) is not method]

    def remove(self) -> None:
        """Put back what was there before."""
        for name in self._ours:
            del vars(self._stage)[name]
        vars(self._stage).update(self._before)
        del vars(self._stage)[_MARK]
        torch_private.restore_buffers(self._stage)

    # --- setting up

    def _set_up_forward(self, num_microbatches: int, has_backward: bool) -> None:
        self._posted.clear()  # of a step that failed
        self._losses.clear()
        with torch_private.allocating_nothing(self._stage):
            self._wrapped["_setup_forward_recv_info"](num_microbatches, has_backward)
        self._describe("forward", torch_private.forward_infos(self._stage))

    def _set_up_backward(self, num_microbatches: int) -> None:
        with torch_private.allocating_nothing(self._stage):
            self._wrapped["_setup_backward_recv_info"](num_microbatches)
        self._describe("backward", torch_private.backward_infos(self._stage))

    def _describe(self, direction: Direction, infos_of: Mapping[int, torch_private.Infos]) -> None:
        for infos in infos_of.values():
            torch_private.drop_buffers(infos)
        if infos_of:
            example = next(iter(infos_of.values()))
            layout = Layout(torch_private.tensors_like(example, torch.device("meta")))
            self._shelf.set_layout(self._stage.stage_index, direction, layout)

    # --- receiving

    # Named as torch names them, who may call by keyword.
    def _post_forward(self, fwd_chunk_id: int) -> list[Any]:
        make_ops = self._wrapped["get_fwd_recv_ops"]
        if self._stage.is_first:
            return list(make_ops(fwd_chunk_id))
        infos = torch_private.forward_infos(self._stage)[fwd_chunk_id]
        return self._post("forward", fwd_chunk_id, infos, make_ops)

    def _post_backward(self, bwd_chunk_id: int) -> list[Any]:
        make_ops = self._wrapped["get_bwd_recv_ops"]
        if self._stage.is_last or not self._stage.has_backward:
            return list(make_ops(bwd_chunk_id))
        infos = torch_private.backward_infos(self._stage)[bwd_chunk_id]
        return self._post("backward", bwd_chunk_id, infos, make_ops)

    def _post(
        self,
        direction: Direction,
        microbatch: int,
        infos: torch_private.Infos,
        make_ops: Callable[[int], list[Any]],
    ) -> list[Any]:
        tensors = self._shelf.lend((self._stage.stage_index, direction, microbatch))
        ops = torch_private.receive_into(infos, tensors, lambda: make_ops(microbatch))
        self._posted[direction, microbatch] = ops
        return ops

    def _take_forward(self, fwd_chunk_id: int) -> Any:
        infos = torch_private.forward_infos(self._stage)[fwd_chunk_id]
        return self._take("forward", fwd_chunk_id, infos, "_retrieve_recv_activations")

    def _take_backward(self, bwd_chunk_id: int) -> Any:
        infos = torch_private.backward_infos(self._stage)[bwd_chunk_id]
        return self._take("backward", bwd_chunk_id, infos, "_retrieve_recv_grads")

    def _take(
        self, direction: Direction, microbatch: int, infos: torch_private.Infos, method: str
    ) -> Any:
        # 1F1B keeps the list of a receive that is done until it makes the next one.
        self._posted.pop((direction, microbatch), []).clear()
        received = self._wrapped[method](microbatch)
        torch_private.drop_buffers(infos)
        return received

    def _take_local_gradients(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        gradients = next_stage_bwd_outputs
        if torch_private.PREALLOCATES:
            infos = torch_private.backward_infos(self._stage)[mb_index]
            gradients = torch_private.zeros_for_none(infos, gradients, self._stage.device)
        self._wrapped["set_local_bwd_input"](gradients, mb_index)

    # --- computing

    def _run_forward(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = self._wrapped["forward_one_chunk"](fwd_chunk_id, *args, **kwargs)
        if not self._stage.has_backward:
            torch_private.forget_inputs(self._stage, fwd_chunk_id)
            self._poison()
        return output

    def _run_backward(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._wrapped["backward_one_chunk"](bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            self._losses[bwd_chunk_id] = loss
        if full_backward:
            self._finish(bwd_chunk_id)

    def _run_weight_backward(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._wrapped["backward_weight_one_chunk"](bwd_chunk_id, last_backward)
        self._finish(bwd_chunk_id)

    def _poison(self) -> None:
        if self._shelf.poison:
            self._shelf.poison_free_slots()

    def _finish(self, microbatch: int) -> None:
        """Let go of a loss's graph, which serves nobody now but keeps the stage's input alive."""
        loss = self._losses.pop(microbatch, None)
        if loss is not None:
            if not loss._is_view():
                loss.detach_()  # the schedule's loop has a reference to it, besides its list
            torch_private.replace_loss(self._schedule, microbatch, loss.detach())
        del loss
        self._poison()
