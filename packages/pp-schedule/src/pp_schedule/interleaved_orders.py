"""Interleaved 1F1B, for any number of ranks, without torch."""

from pp_schedule.orders import Action, Order


def interleaved_1f1b_order(pp_size: int, stages_per_rank: int, num_microbatches: int) -> Order:
    """Interleaved 1F1B as torch's class runs it: depth first, looped stages, whole backwards.

    From Narayanan et al., "Efficient Large-Scale Language Model Training", 2021. A rank takes its
    stages in turn, for a round of microbatches each.

    Raises:
        ValueError: If the microbatches do not make whole rounds.
    """
    rounds = max(1, num_microbatches // pp_size)
    if num_microbatches % rounds:
        raise ValueError(
            f"num_microbatches={num_microbatches} on {pp_size} ranks makes {rounds} rounds, which "
            f"must be of equal length: use a multiple of {pp_size}, such as {rounds * pp_size}"
        )
    per_round = num_microbatches // rounds
    total = stages_per_rank * num_microbatches
    order: dict[int, list[Action | None]] = {}
    for rank in range(pp_size):

        def action(kind: str, step: int, rank: int = rank) -> Action:
            turn, within = divmod(step, per_round)
            first, local = divmod(turn, stages_per_rank)
            if kind == "B":
                local = stages_per_rank - 1 - local
            return Action(rank + pp_size * local, kind, first * per_round + within)

        warmup = min(total, (stages_per_rank - 1) * per_round + 2 * (pp_size - 1 - rank))
        row = [action("F", step) for step in range(warmup)]
        for step in range(warmup, total):
            row += [action("F", step), action("B", step - warmup)]
        row += [action("B", step) for step in range(total - warmup, total)]
        order[rank] = list(row)
    return order
