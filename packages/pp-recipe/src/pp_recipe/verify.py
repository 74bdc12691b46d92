"""Is a model exact in stages? A tiny random copy of it, whole against chained, in one process."""

import copy
import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from pp_patch_hf import CutReport, verify_pipeline
from pp_patch_hf.differ import first_difference
from pp_patch_hf.shrink import shrink_config
from pp_recipe.options import OptionsError
from pp_recipe.resolve import (
    build_random_model,
    import_user_code,
    reason,
    resolve_config,
)
from pp_split_hf import (
    ModelLayout,
    accepts,
    check_config_support,
    check_pipeline_support,
    find_layout,
    main_output,
    spread_over_stages,
)

_RTOL = 1e-5
_MAX_SPLITS = 20
_LENGTH = 12
_FIRST_IDS = 96

Inputs = dict[str, torch.Tensor]
Say = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `autopipeline verify`."""

    model: str
    """A folder with a config.json, a model type, or a hub id in the cache."""
    stages: int | None = None
    """Also try splits into so many stages; None for cuts into two alone."""
    layers: int | None = None
    """Layers of the tiny copy; None for as few as show every kind."""
    full_size: bool = False
    """Take the config as it is."""
    trust_remote_code: bool = False
    """Run the code that the folder brings."""
    imports: tuple[str, ...] = ()
    """Modules or files to import first."""


def verify(options: VerifyOptions, say: Say) -> bool:
    """Compare a model with its stages and return whether all that was tried is exact.

    Args:
        options: What to compare.
        say: Called with each line of the report.

    Raises:
        OptionsError: If there is no such model, or it cannot be cut into stages.
    """
    for name in options.imports:
        import_user_code(name)
    config = resolve_config(options.model, options.trust_remote_code)
    if problems := check_config_support(config):
        raise OptionsError(problems)
    if not options.full_size:
        try:
            config = shrink_config(config, options.layers)
        except Exception as error:
            raise OptionsError([f"{options.model}: {error}"]) from error
    model = build_random_model(config, options.trust_remote_code)
    if problems := check_pipeline_support(model):
        raise OptionsError(problems)
    layout = find_layout(model)
    for line in _describe(model, layout, options):
        say(line)
    splits = _splits(layout, options.stages)
    say(
        f"{'layers':<14}{'input':<14}{'logits':>9}{'gradients':>11}  {'crossing':<10}worst gradient"
    )
    results = [
        _report(model, layout, inputs, kind, outcome, say)
        for kind, inputs in _usable_inputs(model, say)
        for outcome in _compare(model, splits, inputs)
    ]
    failed = results.count(False)
    say(f"{failed} of {len(results)} NOT EXACT" if failed else f"all {len(results)} exact")
    return failed == 0


def _describe(model: PreTrainedModel, layout: ModelLayout, options: VerifyOptions) -> Iterator[str]:
    count = sum(parameter.numel() for parameter in model.parameters())
    size = "full size" if options.full_size else "a tiny copy"
    yield (
        f"{type(model).__name__} ({size} with random weights, float32): {layout.num_layers} "
        f"layers, {count:,} parameters"
    )
    for kind, number in Counter(_layer_kinds(model, layout)).items():
        yield f"  {number} x {kind}"
    for layer, crossing in enumerate(layout.trace.crossings):
        if crossing.problem:
            yield f"  cannot be cut before layer {layer}: {crossing.problem}"


def _layer_kinds(model: PreTrainedModel, layout: ModelLayout) -> list[str]:
    """Return each layer's class, its type in the config, and what others have otherwise in it."""
    layers = [model.get_submodule(fqn) for fqn in layout.layer_fqns]
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    children = [{n: type(m).__name__ for n, m in layer.named_children()} for layer in layers]
    varying = {
        name
        for name in set().union(*children)
        if len({str(each.get(name)) for each in children}) > 1
    }
    kinds = []
    for index, (layer, own) in enumerate(zip(layers, children, strict=True)):
        notes = [str(types[index])] if len(types) == len(layers) else []
        notes += [f"{name} {own[name]}" for name in own if name in varying]
        kinds.append(type(layer).__name__ + (f" ({', '.join(notes)})" if notes else ""))
    return kinds


def _splits(layout: ModelLayout, num_stages: int | None) -> list[tuple[int, ...]]:
    """Return every cut into two and, of those into more stages, all or as many as are enough."""
    cuts = layout.trace.cuts
    splits = [_counts((cut,), layout) for cut in cuts]
    if num_stages is None or num_stages == 2:
        return splits
    if math.comb(len(cuts) + num_stages - 2, num_stages - 1) <= _MAX_SPLITS:
        chosen = list(itertools.combinations_with_replacement(cuts, num_stages - 1))
        return splits + [_counts(bounds, layout) for bounds in chosen]
    generator = random.Random(0)
    others = {spread_over_stages(layout, num_stages): None}
    while len(others) < _MAX_SPLITS:
        bounds = sorted(generator.choices(cuts, k=num_stages - 1))
        others[_counts(bounds, layout)] = None
    return splits + list(others)


def _counts(bounds: Sequence[int], layout: ModelLayout) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise([0, *bounds, layout.num_layers]))


def _usable_inputs(model: PreTrainedModel, say: Say) -> Iterator[tuple[str, Inputs]]:
    """Yield those inputs that the whole model takes, with the name of their kind."""
    for kind, inputs in _inputs(model):
        whole = copy.deepcopy(model)
        problem = "its own logits are no numbers"
        try:
            with torch.no_grad():
                extra = {"use_cache": False} if accepts(whole.forward, "use_cache") else {}
                usable = bool(main_output(whole(**inputs, **extra)).isfinite().all())
        except Exception as error:
            usable, problem = False, reason(error)
        if usable:
            yield kind, inputs
        elif kind == "plain":
            raise OptionsError([f"the whole model does not run: {problem}"])
        else:
            say(f"{'-':<14}{kind:<14}  the whole model does not take it: {problem}")


def _inputs(model: PreTrainedModel) -> Iterator[tuple[str, Inputs]]:
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    text_config = model.config.get_text_config(decoder=True)
    size = getattr(text_config, "vocab_size", None) or next(iter(sizes), _FIRST_IDS)
    # Ids that stand for something, such as an image, are no text.
    configs = [model.config, text_config]
    special = {v for c in configs for n, v in vars(c).items() if n.endswith(("_token_id", "_index"))
               if isinstance(v, int)}  # fmt: skip
    allowed = torch.tensor([i for i in range(min(size, _FIRST_IDS)) if i not in special] or [0])
    generator = torch.Generator().manual_seed(1)
    ids = allowed[torch.randint(0, len(allowed), (2, _LENGTH), generator=generator)]
    yield "plain", {"input_ids": ids}
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" in taken:
        for kind, short in (("padded left", slice(0, 4)), ("padded right", slice(-4, None))):
            mask = torch.ones_like(ids)
            mask[0, short] = 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            extra = {"position_ids": positions} if "position_ids" in taken else {}
            yield kind, {"input_ids": ids, "attention_mask": mask, **extra}
    if "position_ids" in taken:
        starts = [[*range(5), *range(_LENGTH - 5)], [*range(8), *range(_LENGTH - 8)]]
        yield "packed", {"input_ids": ids, "position_ids": torch.tensor(starts)}


Outcome = tuple[tuple[int, ...], CutReport | Exception]


def _compare(
    model: PreTrainedModel, splits: Sequence[tuple[int, ...]], inputs: Inputs
) -> list[Outcome]:
    """Return a report for each split, or what its stages raised."""
    try:
        return list(zip(splits, verify_pipeline(model, splits, inputs, _RTOL).cuts, strict=True))
    except Exception as error:
        if len(splits) == 1:
            return [(splits[0], error)]
        return [outcome for split in splits for outcome in _compare(model, [split], inputs)]


def _report(
    model: PreTrainedModel,
    layout: ModelLayout,
    inputs: Inputs,
    kind: str,
    outcome: Outcome,
    say: Say,
) -> bool:
    """Say one row and, where it is not exact, where the stages first go another way."""
    split, cut = outcome
    start = f"{','.join(map(str, split)):<14}{kind:<14}"
    if isinstance(cut, Exception):
        say(f"{start}NOT EXACT  the stages do not run: {reason(cut)}")
        return False
    ends = itertools.accumulate(split[:-1])
    crossing = "+".join(str(len(layout.trace.crossings[end].slots)) for end in ends)
    exact = cut.exact(_RTOL)
    worst = cut.worst_parameter if cut.gradient_error > 0 else "-"
    say(
        f"{start}{cut.logits_error:>9.1e}{cut.gradient_error:>11.1e}  {crossing:<10}"
        f"{'exact' if exact else 'NOT EXACT':<11}{worst}"
    )
    if not exact:
        first = first_difference(model, split, inputs, _RTOL)
        if first is None:
            say("    every module returns the same: only gradients differ")
        else:
            name = first.fqn or "the model itself"
            say(f"    first differs: {name} (stage {first.stage}), by {first.error:.1e}")
    return exact
