"""Which stage runs on which rank, and how many stages there are. Arithmetic only."""

from typing import Literal

PlacementStyle = Literal["loop", "v"]


def stage_ids_this_rank(
    pp_rank: int, pp_size: int, num_stages: int, style: str = "loop"
) -> tuple[int, ...]:
    """Return the global indices of the stages that run on one pipeline rank.

    Args:
        pp_rank: Rank along the pipeline axis, from 0.
        pp_size: Number of ranks along the pipeline axis.
        num_stages: Number of stages of the whole pipeline, a multiple of `pp_size`.
        style: `"loop"` deals the stages out round by round (rank 0 of 4 gets 0, 4, 8, ...);
            `"v"` goes down and back up with two stages per rank (rank 0 of 4 gets 0 and 7), as
            the ZBV and DualPipeV schedules need.

    Raises:
        ValueError: If the sizes do not fit each other; the message names all that is wrong.
    """
    problems = []
    if style not in ("loop", "v"):
        problems.append(f"style={style!r} is neither 'loop' nor 'v'")
    if pp_size < 1:
        problems.append(f"pp_size={pp_size} must be at least 1")
    elif not 0 <= pp_rank < pp_size:
        problems.append(f"pp_rank={pp_rank} is not in 0..{pp_size - 1} (pp_size={pp_size})")
    if style == "v" and pp_size >= 1 and num_stages != 2 * pp_size:
        problems.append(
            f"style='v' places exactly 2 stages per rank: pp_size={pp_size} needs "
            f"num_stages={2 * pp_size}, not {num_stages}"
        )
    elif pp_size >= 1 and (num_stages < 1 or num_stages % pp_size):
        lower = max(pp_size, num_stages - num_stages % pp_size)
        problems.append(
            f"num_stages={num_stages} is not a positive multiple of pp_size={pp_size}; "
            f"use {lower} or {lower + pp_size}"
        )
    if problems:
        raise ValueError("cannot place stages: " + "; ".join(problems))
    if style == "v":
        return (pp_rank, num_stages - 1 - pp_rank)
    return tuple(range(pp_rank, num_stages, pp_size))


def calculate_virtual_stages(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    is_single_stage_schedule: bool,
    round_to_pp_multiple: str | None = None,
) -> tuple[int, int]:
    """Return `(num_virtual_stages, stages_per_rank)` for a model of `num_layers` layers.

    With `layers_per_stage` there are ceil(num_layers / layers_per_stage) stages, rounded to a
    multiple of `pp_size` if `round_to_pp_multiple` is `"up"` or `"down"`; the layers are later
    spread evenly over them. Without it a single-stage schedule gets one stage per rank and any
    other schedule two.

    Raises:
        ValueError: If the stages do not divide over the ranks, or do not suit the schedule kind;
            the message names all that is wrong.
    """
    problems = _size_problems(num_layers, layers_per_stage, pp_size, round_to_pp_multiple)
    if problems:
        raise ValueError("cannot divide the layers into stages: " + "; ".join(problems))
    if layers_per_stage is None:
        stages_per_rank = 1 if is_single_stage_schedule else 2
        return pp_size * stages_per_rank, stages_per_rank

    num_stages = _num_stages(num_layers, layers_per_stage, pp_size, round_to_pp_multiple)
    if _fits(num_stages, pp_size, is_single_stage_schedule):
        return num_stages, num_stages // pp_size
    fitting = [
        n
        for n in range(1, num_layers + 1)
        if _fits(
            _num_stages(num_layers, n, pp_size, round_to_pp_multiple),
            pp_size,
            is_single_stage_schedule,
        )
    ]
    advice = []
    if fitting:
        nearest = min(fitting, key=lambda n: abs(n - layers_per_stage))
        advice.append(f"set layers_per_stage={nearest}")
    asked = f"num_layers={num_layers} with layers_per_stage={layers_per_stage}"
    if round_to_pp_multiple is not None:
        asked += f", rounded {round_to_pp_multiple},"
    if num_stages == 0 or num_stages % pp_size:
        problem = f"{num_stages} stages, which do not divide over pp_size={pp_size} ranks"
        if round_to_pp_multiple is None:
            advice.append("set round_virtual_stages_to_pp_multiple to 'up' or 'down'")
        else:
            advice.append("use fewer ranks")
    elif is_single_stage_schedule:
        problem = (
            f"{num_stages // pp_size} stages per rank, but a single-stage schedule runs exactly 1"
        )
        advice.append("choose an interleaved schedule")
    else:
        problem = "1 stage per rank, but a multi-stage schedule needs at least 2"
        advice.append("choose a single-stage schedule")
    raise ValueError(f"{asked} makes {problem}: {' or '.join(advice)}")


def _num_stages(
    num_layers: int, layers_per_stage: int, pp_size: int, round_to_pp_multiple: str | None
) -> int:
    num_stages = -(-num_layers // layers_per_stage)
    if round_to_pp_multiple == "up":
        return num_stages + -num_stages % pp_size
    if round_to_pp_multiple == "down":
        return num_stages - num_stages % pp_size
    return num_stages


def _fits(num_stages: int, pp_size: int, is_single_stage_schedule: bool) -> bool:
    stages_per_rank, remainder = divmod(num_stages, pp_size)
    return not remainder and (
        stages_per_rank == 1 if is_single_stage_schedule else stages_per_rank >= 2
    )


def _size_problems(
    num_layers: int, layers_per_stage: int | None, pp_size: int, round_to_pp_multiple: str | None
) -> list[str]:
    problems = []
    if num_layers < 1:
        problems.append(f"num_layers={num_layers} must be at least 1")
    if layers_per_stage is not None and layers_per_stage < 1:
        problems.append(f"layers_per_stage={layers_per_stage} must be at least 1, or None")
    if pp_size < 1:
        problems.append(f"pp_size={pp_size} must be at least 1")
    if round_to_pp_multiple not in (None, "up", "down"):
        problems.append(
            f"round_to_pp_multiple={round_to_pp_multiple!r} is none of 'up', 'down', None"
        )
    return problems
