"""What keeps a program, an order with its communication, from running. Arithmetic only.

Receives are posted without waiting, sends are made without waiting, and messages between two ranks
arrive in the order in which they were sent: that is how torch's runtime works on every transport.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pp_schedule.lowering import Instruction
from pp_schedule.orders import Action, validate_order

Rows = Mapping[int, Sequence[Instruction | None]]
"""A program as it was written, idle steps included; fused pairs are taken apart."""

COMPUTE_KINDS = ("F", "B", "I", "W")
# How far away the stage is at the other end.
_PEER = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}


@dataclass(frozen=True)
class _Layout:
    """Where everything is that comes once only, which leaves out UNSHARD and RESHARD."""

    rank_of: dict[int, int]
    """The rank of each stage."""
    where: dict[Instruction, int]
    """The place of each step in the row of its stage's rank."""

    def name(self, step: Instruction) -> str:
        """Name a step with its rank and place."""
        return _name(step, self.rank_of[step.stage_index], self.where[step])


class _Transfer(NamedTuple):
    send: Instruction
    made_by: Instruction
    receive: Instruction
    used_by: Instruction


def validate_program(rows: Rows) -> list[str]:
    """Return everything that keeps a program from running, as sentences; an empty list is a pass.

    Found: all that `validate_order` finds in its computations; sends and receives that are missing,
    repeated, needless, on the wrong rank, too early or too late, or that pair up in another order;
    waits and reductions that are missing or out of place; stages that are used when FSDP has not
    gathered them; and ranks that wait for each other for ever.
    """
    order = {
        rank: [
            Action(step.stage_index, step.kind, step.microbatch or 0)
            if step and step.kind in COMPUTE_KINDS
            else None
            for step in steps
        ]
        for rank, steps in rows.items()
    }
    actions = [action for row in order.values() for action in row if action is not None]
    num_stages = 1 + max((action.stage_index for action in actions), default=-1)
    num_microbatches = 1 + max((action.microbatch for action in actions), default=-1)
    problems = validate_order(order, num_stages, num_microbatches)
    if problems:
        return problems  # without a valid order nothing can be said of its communication
    layout = _Layout({a.stage_index: rank for rank, row in order.items() for a in row if a}, {})
    problems += _place(rows, layout)
    transfers = list(_transfers(layout))
    problems += _transfer_problems(layout, transfers)
    problems += _reduction_problems(layout, num_microbatches)
    for rank, steps in rows.items():
        problems += _fsdp_problems(rank, steps)
    if any(step and step.kind.startswith("WAIT") for steps in rows.values() for step in steps):
        problems += _wait_problems(layout)
    if not problems:
        problems += _order_problems(layout, transfers)
    return problems or _deadlocks(rows, layout, transfers)


def _name(step: Instruction, rank: int, index: int) -> str:
    return f"{step} (rank {rank}, action {index})"


def _place(rows: Rows, layout: _Layout) -> list[str]:
    """Note where each step is; return what is doubled or on a wrong rank."""
    problems = []
    where, rank_of = layout.where, layout.rank_of
    for rank, steps in rows.items():
        for index, step in enumerate(steps):
            if step is None:
                continue
            home = rank_of.get(step.stage_index)
            if home == rank:
                if step.kind in ("UNSHARD", "RESHARD"):
                    continue
                if where.setdefault(step, index) != index:
                    problems.append(f"{_name(step, rank, index)}: repeats action {where[step]}")
            elif home is None:
                stages = f"0..{len(rank_of) - 1}"
                problems.append(f"{_name(step, rank, index)}: there are stages {stages} only")
            else:
                why = f"stage {step.stage_index} runs on rank {home}"
                problems.append(f"{_name(step, rank, index)}: {why}")
    return problems


def _transfers(layout: _Layout) -> Iterator[_Transfer]:
    """Tell what must be sent: each result that a stage on another rank needs."""
    where, rank_of = layout.where, layout.rank_of
    for step in where:
        stage, kind, microbatch, _ = step
        if kind not in ("F", "B", "I"):
            continue
        way = "F" if kind == "F" else "B"
        to = stage + 1 if way == "F" else stage - 1
        if rank_of.get(to, rank_of[stage]) == rank_of[stage]:
            continue
        used_by = Instruction(to, way, microbatch)
        if used_by not in where:
            used_by = Instruction(to, "I", microbatch)
        send = Instruction(stage, f"SEND_{way}", microbatch)
        yield _Transfer(send, step, Instruction(to, f"RECV_{way}", microbatch), used_by)


def _transfer_problems(layout: _Layout, transfers: Sequence[_Transfer]) -> list[str]:
    problems = []
    where, rank_of, name = layout.where, layout.rank_of, layout.name
    for send, made_by, receive, used_by in transfers:
        if send not in where:
            problems.append(
                f"rank {rank_of[made_by.stage_index]}: {send} is missing after {name(made_by)}, "
                f"so {name(used_by)} waits for ever"
            )
        elif where[send] < where[made_by]:
            problems.append(f"{name(send)} sends what {name(made_by)} makes later")
        if receive not in where:
            rank = rank_of[used_by.stage_index]
            problems.append(f"rank {rank}: {receive} is missing before {name(used_by)}")
        elif where[receive] > where[used_by]:
            problems.append(f"{name(receive)} comes after {name(used_by)}, which needs it")
    expected = {step for transfer in transfers for step in (transfer.send, transfer.receive)}
    for step in where:
        if step.kind in _PEER and step not in expected:
            peer = step.stage_index + _PEER[step.kind]
            if peer not in rank_of:
                why = f"there is no stage {peer}"
            elif rank_of[peer] == rank_of[step.stage_index]:
                why = f"stage {peer} is on the same rank, so nothing is sent"
            else:
                why = f"there is no microbatch {step.microbatch}"
            problems.append(f"{name(step)}: {why}")
    return problems


def _order_problems(layout: _Layout, transfers: Sequence[_Transfer]) -> list[str]:
    """Find the first receive of each pair of ranks that gets another message than it is for."""
    where, rank_of = layout.where, layout.rank_of
    channels: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for transfer in transfers:
        ends = rank_of[transfer.send.stage_index], rank_of[transfer.receive.stage_index]
        channels[ends].append(transfer)
    problems = []
    for (sender, receiver), messages in channels.items():
        sent = [t.send for t in sorted(messages, key=lambda t: where[t.send])]
        received = sorted(messages, key=lambda t: where[t.receive])
        for send, transfer in zip(sent, received, strict=True):
            if send != transfer.send:
                problems.append(
                    f"{layout.name(send)} arrives at {layout.name(transfer.receive)}, which is for "
                    f"{transfer.send}: rank {receiver} must receive in the order in which rank "
                    f"{sender} sends"
                )
                break
    return problems


def _reduction_problems(layout: _Layout, num_microbatches: int) -> list[str]:
    """Every stage reduces (and scales) its gradients once, when all of them are there."""
    where = layout.where
    problems = []
    for stage, rank in layout.rank_of.items():
        backwards = (Instruction(stage, k, m) for m in range(num_microbatches) for k in "BW")
        last = max((b for b in backwards if b in where), key=lambda b: where[b])
        reduction = Instruction(stage, "REDUCE_GRAD")
        if reduction not in where:
            problems.append(f"rank {rank}: {reduction} is missing after {layout.name(last)}")
        elif where[reduction] < where[last]:
            problems.append(f"{layout.name(reduction)} comes before {layout.name(last)}")
    return problems


def _fsdp_problems(rank: int, steps: Sequence[Instruction | None]) -> list[str]:
    """A stage is gathered before it is used, and given up before it is gathered again."""
    if not any(step and step.kind in ("UNSHARD", "RESHARD") for step in steps):
        return []  # written for stages that are not sharded
    problems = []
    resident: dict[int, int] = {}
    for index, step in enumerate(steps):
        if step is None:
            continue
        stage, kind, _, _ = step
        if kind == "UNSHARD" and stage in resident:
            problems.append(f"{_name(step, rank, index)}: gathered by action {resident[stage]}")
        elif kind == "UNSHARD":
            resident[stage] = index
        elif kind == "RESHARD" and resident.pop(stage, None) is None:
            problems.append(f"{_name(step, rank, index)}: stage {stage} is not gathered")
        elif kind in COMPUTE_KINDS and stage not in resident:
            problems.append(f"{_name(step, rank, index)}: no {stage}UNSHARD before it")
    for stage, index in resident.items():
        unshard = Instruction(stage, "UNSHARD")
        problems.append(f"{_name(unshard, rank, index)}: no {stage}RESHARD after it")
    return problems


def _wait_problems(layout: _Layout) -> list[str]:
    """In a program with waits, every send and every reduction has its own, after it."""
    where, name = layout.where, layout.name
    problems = []
    waits = {kind: f"WAIT_{kind}" for kind in ("SEND_F", "SEND_B", "REDUCE_GRAD")}
    waited = {wait: kind for kind, wait in waits.items()}
    for step, index in where.items():
        stage, kind, microbatch, _ = step
        if kind in waits:
            wait = Instruction(stage, waits[kind], microbatch)
            if wait not in where:
                rank = layout.rank_of[stage]
                problems.append(f"rank {rank}: {wait} is missing after {name(step)}")
        elif kind in waited:
            begun = Instruction(stage, waited[kind], microbatch)
            if begun not in where or where[begun] > index:
                problems.append(f"{name(step)}: no {begun} before it")
    pending: dict[int, Instruction] = {}
    reductions = [step for step in where if step.kind.endswith("REDUCE_GRAD")]
    for step in sorted(reductions, key=lambda step: where[step]):
        rank = layout.rank_of[step.stage_index]
        if step.kind == "WAIT_REDUCE_GRAD":
            pending.pop(rank, None)
        elif pending.setdefault(rank, step) != step:
            problems.append(f"{name(step)}: {pending[rank]} has not ended")
    return problems


def _deadlocks(rows: Rows, layout: _Layout, transfers: Sequence[_Transfer]) -> list[str]:
    """Run the program without a clock; tell where each rank stops, if not at its end."""
    where, rank_of = layout.where, layout.rank_of
    waits: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in rows}
    for send, _, receive, used_by in transfers:
        ends = rank_of[send.stage_index], rank_of[receive.stage_index]
        waits[ends[1]].append((where[used_by], ends[0], where[send]))
        wait = where.get(Instruction(send.stage_index, f"WAIT_{send.kind}", send.microbatch))
        if wait is not None:  # it ends when the receive is posted
            waits[ends[0]].append((wait, ends[1], where[receive]))
    for steps in waits.values():
        steps.sort(reverse=True)  # the next one is the last
    # Each rank has come to its next wait.
    position = {rank: steps[-1][0] if steps else len(rows[rank]) for rank, steps in waits.items()}
    moved = True
    while moved:
        moved = False
        for rank, steps in waits.items():
            while steps and position[steps[-1][1]] > steps[-1][2]:
                steps.pop()
                position[rank] = steps[-1][0] if steps else len(rows[rank])
                moved = True
    problems = []
    for rank, steps in waits.items():
        if steps:
            index, peer, needed = steps[-1]
            at, other = rows[rank][index], rows[peer][needed]
            assert at is not None
            assert other is not None
            problems.append(
                f"{_name(at, rank, index)} waits for ever for {_name(other, peer, needed)}"
            )
    return problems
