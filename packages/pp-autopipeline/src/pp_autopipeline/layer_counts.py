"""How many layers each stage gets: as many as every other, or as many as cost as much."""

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from pp_autopipeline.config import PipelineConfig
from pp_autopipeline.estimate import estimate_costs
from pp_schedule import Balance, Costs, balance, stage_ids_this_rank
from pp_split_hf import ModelLayout, spread_over_stages

BalanceBy = Literal["layers", "cost"] | Costs
"""By what stages are made even: layers, estimated costs, or the costs given."""

_LONGEST = 4096


def balance_problems(by: object) -> list[str]:
    """Return what is wrong with a value of `balance`."""
    if isinstance(by, Costs) or by in ("layers", "cost"):
        return []
    near = difflib.get_close_matches(str(by).lower(), ("layers", "cost"), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? It" if near else "it"
    return [f"balance={by!r}: {hint} is 'layers', 'cost' or pp_schedule.Costs"]


def choose_layer_counts(
    model: nn.Module,
    layout: ModelLayout,
    stage_ids: Mapping[int, Sequence[int]],
    config: PipelineConfig,
    by: BalanceBy,
) -> tuple[tuple[int, ...], Balance | None]:
    """Return the layers of every stage, and how good that is if costs decided.

    Only places count at which the model can be cut. Every rank decides alike: costs are estimated
    from shapes alone.

    Args:
        model: The whole model.
        layout: Of the model.
        stage_ids: Stages of every pipeline rank.
        config: Tells the microbatch; without `pp_seq_len` costs are those of the longest sequence
            that the model's config names, 4096 at most.
        by: What is to be even.

    Raises:
        ValueError: If the costs are of another model or cannot be estimated, or if the stages are
            placed in a way that cannot be weighed.
    """
    num_stages = sum(map(len, stage_ids.values()))
    if isinstance(by, str) and by == "layers":
        return spread_over_stages(layout, num_stages), None
    pp_size, style = _placement(stage_ids, num_stages)
    try:
        costs = by if isinstance(by, Costs) else estimated_costs(model, layout, config)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"balance='cost': {error}") from error
    if len(costs.layers) != layout.num_layers:
        raise ValueError(
            f"balance has costs of {len(costs.layers)} layers, but {type(model).__name__} has "
            f"{layout.num_layers}"
        )
    works = [layer.work for layer in costs.layers]
    first, last = costs.first.work, costs.last.work
    # What cannot be cut is weighed as one; at either end, with what the end stage has anyway.
    cuts = layout.trace.cuts
    sizes = [high - low for low, high in pairwise(cuts)]
    blocks = [sum(works[low:high]) for low, high in pairwise(cuts)]
    counts = balance(
        blocks,
        first + sum(works[: cuts[0]]),
        last + sum(works[cuts[-1] :]),
        num_stages,
        pp_size,
        style,
    )
    layers, start = [], 0
    for count in counts:
        layers.append(sum(sizes[start : start + count]))
        start += count
    layers[0] += cuts[0]
    layers[-1] += layout.num_layers - cuts[-1]
    return tuple(layers), Balance.of(layers, works, first, last, pp_size, style)


def describe_balance(
    weighed: Balance, stage_ids: Mapping[int, Sequence[int]], unit: str
) -> list[str]:
    """Return in two lines how good a split is and which rank has the most to do."""
    heaviest = weighed.rank_loads.index(weighed.heaviest)
    num_stages = len(weighed.layer_counts)
    if len(weighed.rank_loads) == num_stages:  # then they are the loads of stages
        heaviest = next(rank for rank, ids in stage_ids.items() if heaviest in ids)
    stages = ", ".join(map(str, sorted(stage_ids[heaviest])))
    return [
        f"split by cost: {weighed}",
        f"heaviest: pipeline rank {heaviest} (stages {stages}) with {weighed.heaviest:.3g} {unit} "
        f"per microbatch; ideal {weighed.ideal:.3g}, spread evenly {max(weighed.even_rank_loads):.3g}",
    ]


def _placement(
    stage_ids: Mapping[int, Sequence[int]], num_stages: int
) -> tuple[int | None, Literal["loop", "v"]]:
    """Return ranks and style for `balance`; with one stage per rank it matters not which."""
    pp_size = len(stage_ids)
    if all(len(ids) == 1 for ids in stage_ids.values()):
        return None, "loop"
    styles: tuple[Literal["loop", "v"], ...] = ("loop", "v")
    if num_stages % pp_size == 0:
        for style in styles:
            if all(
                sorted(ids) == sorted(stage_ids_this_rank(rank, pp_size, num_stages, style))
                for rank, ids in stage_ids.items()
            ):
                return pp_size, style
    raise ValueError(
        f"balance cannot weigh stages that are placed as pp_schedule_csv places them "
        f"({dict(stage_ids)}), neither in loops nor in a V: use balance='layers', or list the "
        "modules of every stage in module_fqns_per_model_part"
    )


def estimated_costs(model: nn.Module, layout: ModelLayout, config: PipelineConfig) -> Costs:
    """Return the costs of a microbatch of `config`, from shapes alone.

    Without `pp_seq_len` it is as long as the model's config allows, 4096 tokens at most.

    Raises:
        ValueError: If they cannot be estimated.
        RuntimeError: If the forward cannot run on fake tensors.
    """
    seq_len = config.pp_seq_len
    if seq_len is None:
        model_config: Any = model.config
        text = model_config.get_text_config(decoder=True)
        seq_len = min(getattr(text, "max_position_embeddings", None) or _LONGEST, _LONGEST)
    return estimate_costs(
        model,
        seq_len=seq_len,
        microbatch_size=config.pp_microbatch_size,
        layout=layout,
        dtype=config.dtype,
    )
