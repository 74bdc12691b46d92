"""Programs: an order with its communication. Arithmetic only.

A program maps each pipeline rank to all that torch's runtime does there: the computations of an
order, the sends and receives between them, and what FSDP needs around them. torch derives it from
an order in time that is quadratic in the microbatches; here the same list is made in linear time.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pp_schedule.orders import Order

Dialect = Literal["2.13", "2.15"]
"""The torch release that first lowered so; 2.14 does as 2.13.

Since 2.15 every send and every reduction of gradients has its wait, and stages are given up in the
order in which they were gathered; before, in that of a set.
"""

# torch's default: so many stages of a rank are gathered by FSDP at a time.
_RESIDENT_STAGES = 3


class Instruction(NamedTuple):
    """One step of a rank's program, written as torch writes it: `2SEND_F5`, `2UNSHARD`."""

    stage_index: int
    """Global stage index; -1 for a fused pair."""
    kind: str
    """`F`, `B`, `I`, `W`, `SEND_F`, `RECV_B`, `UNSHARD` and so on."""
    microbatch: int | None = None
    """Microbatch index; None for what concerns all of them."""
    parts: tuple["Instruction", ...] | None = None
    """The forward and the backward that DualPipeV fuses into one step."""

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage_index}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Program = Mapping[int, Sequence[Instruction]]

# Torch's own actions are tuples of the same four fields, so they need not be translated.
Step = TypeVar("Step", bound=tuple[int, str, int | None, tuple[Any, ...] | None])
Make = Callable[[int, str, int | None], Step]


def computations(order: Order) -> dict[int, list[Instruction]]:
    """Return an order as a program without communication; idle steps are dropped."""
    return {
        rank: [Instruction(*action) for action in actions if action is not None]
        for rank, actions in order.items()
    }


def lower(
    compute: Mapping[int, Sequence[Step]],
    num_microbatches: int,
    dialect: Dialect,
    make: "Make[Step]",
) -> dict[int, list[Step]]:
    """Add communication to a program that has none, as the torch of that dialect does.

    Args:
        compute: A valid order without idle steps; fused pairs are allowed.
        num_microbatches: Microbatches per step.
        dialect: That of the torch which is to run the program.
        make: Makes a step from stage index, kind and microbatch.

    Raises:
        ValueError: If the ranks wait for each other for ever.
    """
    rows = {
        rank: _add_fsdp(steps, num_microbatches, dialect, make) for rank, steps in compute.items()
    }
    program = _add_transfers(rows, make)
    if dialect == "2.15":
        program = {rank: _add_send_waits(steps, make) for rank, steps in program.items()}
    return program


def leaves(step: Step) -> Sequence[Step]:
    """Return what a step runs: its parts, one after the other, or itself."""
    return step[3] or (step,)


def ranks_of_stages(program: Mapping[int, Sequence[Step]]) -> dict[int, int]:
    """Return which rank runs which stage."""
    return {
        leaf[0]: rank for rank, steps in program.items() for step in steps for leaf in leaves(step)
    }


def _add_fsdp(
    steps: Sequence[Step], num_microbatches: int, dialect: Dialect, make: "Make[Step]"
) -> list[Step]:
    """Gather a stage's weights before they are used, drop them when others are due, and reduce."""
    result: list[Step] = []
    resident: dict[int, None] = {}
    unordered: set[int] = set()
    # The same changes as in torch 2.13 make a set of the same order.
    in_order: Collection[int] = unordered if dialect == "2.13" else resident
    backwards: Counter[int] = Counter()

    def reshard(stages: Iterable[int]) -> None:
        for stage in stages:
            del resident[stage]
            unordered.remove(stage)
            result.append(make(stage, "RESHARD", None))

    for step, wanted in zip(steps, _wanted_stages(steps), strict=True):
        if resident.keys() != set(wanted):
            gathered = [stage for stage in wanted if stage not in resident]
            reshard([stage for stage in in_order if stage not in wanted])
            for stage in gathered:
                resident[stage] = None
                unordered.add(stage)
                result.append(make(stage, "UNSHARD", None))
        result.append(step)
        for stage, kind, *_ in leaves(step):
            if kind in ("B", "W"):
                backwards[stage] += 1
                if backwards[stage] == num_microbatches:
                    result.append(make(stage, "REDUCE_GRAD", None))
                    if dialect == "2.15":
                        result.append(make(stage, "WAIT_REDUCE_GRAD", None))
    reshard(list(in_order))
    return result


def _wanted_stages(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """Return for each step the stages that come next, its own included, nearest first."""
    wanted: list[tuple[int, ...]] = [()] * len(steps)
    coming: list[int] = []
    next_use: dict[int, int] = {}
    for index in reversed(range(len(steps))):
        for leaf in reversed(leaves(steps[index])):
            if leaf[0] in next_use:
                coming.remove(leaf[0])
            coming.insert(0, leaf[0])
            next_use[leaf[0]] = index
        size = _RESIDENT_STAGES
        # The stages of a fused pair come together, one more than fits or not.
        while size < len(coming) and next_use[coming[size - 1]] == next_use[coming[size]]:
            size += 1
        wanted[index] = tuple(coming[:size])
    return wanted


def _add_transfers(rows: Mapping[int, Sequence[Step]], make: "Make[Step]") -> dict[int, list[Step]]:
    """Send each result on when it is made; the receive is posted at that moment.

    The ranks take turns, one step each, and a rank whose input is not there misses its turn. So
    two ranks see the transfers between them in the same order, and cannot block each other.
    """
    rank_of = ranks_of_stages(rows)
    last_stage = max(rank_of)
    forwarded: set[tuple[int, int | None]] = set()
    returned: set[tuple[int, int | None]] = set()
    result: dict[int, list[Step]] = {rank: [] for rank in rows}
    position = dict.fromkeys(rows, 0)

    def input_is_there(leaf: Step) -> bool:
        stage, kind, microbatch, _ = leaf
        if kind == "F":
            return stage == 0 or (stage - 1, microbatch) in forwarded
        if kind in ("B", "I"):
            return stage == last_stage or (stage + 1, microbatch) in returned
        return True

    def run(rank: int, leaf: Step) -> None:
        stage, kind, microbatch, _ = leaf
        if kind == "F":
            forwarded.add((stage, microbatch))
            transfer(rank, stage, stage + 1, "SEND_F", "RECV_F", microbatch)
        elif kind in ("B", "I"):
            returned.add((stage, microbatch))
            transfer(rank, stage, stage - 1, "SEND_B", "RECV_B", microbatch)

    def transfer(rank: int, stage: int, to: int, send: str, receive: str, m: int | None) -> None:
        peer = rank_of.get(to, rank)
        if peer != rank:
            result[rank].append(make(stage, send, m))
            result[peer].append(make(to, receive, m))

    waiting = [rank for rank in sorted(rows) if rows[rank]]
    while waiting:
        moved = False
        for rank in waiting:
            step = rows[rank][position[rank]]
            if all(map(input_is_there, leaves(step))):
                result[rank].append(step)
                for leaf in leaves(step):
                    run(rank, leaf)
                position[rank] += 1
                moved = True
        if not moved:
            stuck = ", ".join(f"rank {rank} at {rows[rank][position[rank]]}" for rank in waiting)
            raise ValueError(f"the ranks wait for each other for ever: {stuck}")
        waiting = [rank for rank in waiting if position[rank] < len(rows[rank])]
    return result


def _add_send_waits(steps: Sequence[Step], make: "Make[Step]") -> list[Step]:
    """Wait for a forward's send after its backward, which proves it arrived; else at the end."""
    result: list[Step] = []
    pending: dict[tuple[str, int, int | None], None] = {}
    for step in steps:
        result.append(step)
        for stage, kind, microbatch, _ in leaves(step):
            if kind in ("SEND_F", "SEND_B"):
                # Written out: torch's kinds equal these strings, but have other hashes.
                pending["SEND_F" if kind == "SEND_F" else "SEND_B", stage, microbatch] = None
            elif kind in ("B", "I") and ("SEND_F", stage, microbatch) in pending:
                del pending["SEND_F", stage, microbatch]
                result.append(make(stage, "WAIT_SEND_F", microbatch))
    result += [make(stage, f"WAIT_{kind}", m) for kind, stage, m in pending]
    return result
