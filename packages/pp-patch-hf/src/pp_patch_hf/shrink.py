"""A tiny copy of a model's config: every kind of layer and every option, few parameters."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from pp_split_hf import accepts

_MAX_PARAMETERS, _MAX_WIDTH = 2_000_000, 512
_VOCAB, _FIRST_MOVED_ID = 128, 96
_MIN_LAYERS, _MAX_LAYERS, _MAX_KINDS = 4, 8, 6
_SIZES = {"head_dim": 16, "heads": 4, "experts": 8, "top_k": 4, "window": 4, "block": 2, "first": 0}
# Tried one after the other in place of those above.
_OTHER_SIZES: tuple[dict[str, int], ...] = (
    {},
    {"block": 1},
    {"head_dim": 32},
    {"first": 1},
    {"experts": 4, "top_k": 2},
    {"experts": 4, "top_k": 2, "head_dim": 8},
    {"experts": 4, "top_k": 1, "head_dim": 32, "heads": 8, "window": 8},
)


def shrink_config(config: PretrainedConfig, num_layers: int | None = None) -> PretrainedConfig:
    """Make a tiny copy of a config that keeps what makes the architecture special.

    Sizes, counts, windows, positions and the vocabulary get small in proportion; kinds of layers
    and of rotary embedding, multipliers, soft caps, dropouts and all switches stay. Only a
    `quantization_config` is left out: it describes stored weights. Where Transformers knows a
    model for the config's class, that model has run forward and backward.

    Args:
        config: The config of a decoder, or of a model around one; it is not changed.
        num_layers: Layers of the decoder; by default as few as show every kind of layer, twice if
            that is not too many, at least four. Fewer leave out the kinds that come last.

    Returns:
        A new config of the same class.

    Raises:
        ValueError: If `num_layers` is below one, or no set of small sizes gives a model that runs.
    """
    if num_layers is not None and num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}: a model needs at least one layer.")
    errors: dict[str, dict[str, int]] = {}
    for sizes in _OTHER_SIZES:
        try:
            chosen = _SIZES | sizes | {"layers": num_layers or 0}
            small = type(config)(**_Part(config, chosen).small())
            _check_runs(small, _MAX_PARAMETERS * max(_MAX_LAYERS, num_layers or 0) // _MAX_LAYERS)
            return small
        except Exception as error:  # whatever a class objects to, the next candidate may suit it
            errors[f"  {type(error).__name__}: {str(error).strip()[:300]}"] = sizes
    tried = "\n".join(
        f"{error} (last with {sizes or 'defaults'})" for error, sizes in errors.items()
    )
    raise ValueError(
        f"No tiny copy of {type(config).__name__} runs; {len(_OTHER_SIZES)} sets of sizes were tried:"
        f"\n{tried}\nCheck that the config is complete, or build a small one by hand."
    )


def _check_runs(config: PretrainedConfig, max_parameters: int) -> None:
    """Raise unless the config's model, if one is known, is small and runs both ways."""
    remote = getattr(config, "auto_map", None) or {}
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote:
        auto: Any = transformers.AutoModelForCausalLM
    elif type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        auto = transformers.AutoModelForMultimodalLM
    else:
        return
    # Who holds a config of remote code has let that code run already.
    trust = type(config).__module__.startswith("transformers_modules.")
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust)
    if (count := sum(p.numel() for p in model.parameters())) > max_parameters:
        raise ValueError(f"the model has {count} parameters, more than {max_parameters}")
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(config, trust_remote_code=trust).eval()
        kwargs = {"use_cache": False} if accepts(model.forward, "use_cache") else {}
        model(input_ids=torch.arange(8, 32).view(2, 12), **kwargs)[0].float().sum().backward()


class _Part:
    """One config: its values, and the sizes that they become small in proportion to."""

    def __init__(
        self, config: PretrainedConfig, sizes: dict[str, int], whole: "_Part | None" = None
    ) -> None:
        self.config, self.sizes, self.whole = config, sizes, whole or self
        self.token_ids: dict[int, int] = {}
        self.hidden_sizes: dict[int, int] = {}
        own = vars(config).items()
        sub_configs = {n: v for n, v in own if isinstance(v, PretrainedConfig)}
        # What is written out may be laid out in another way than what the class computes with.
        live = {n: v for n, v in own if isinstance(v, int | list)}
        left_out = {"quantization_config", *sub_configs}
        values = {n: live.get(n, v) for n, v in config.to_dict().items() if n not in left_out}
        self.values: dict[str, Any] = values
        self.is_text = any("vocab" in name for name in values)
        self.depth = self.count(_DEPTH, "num_hidden_layers")
        heads = self.count(_QUERY_HEADS, "num_attention_heads")
        self.heads: int = heads or (whole.heads if whole else sizes["heads"])
        hidden = self.count("^embed_dim$") or self.count(_HIDDEN, "hidden_size")
        self.hidden: int = hidden or (whole.hidden if whole else 1024)
        head_dim = values.get("head_dim") or max(1, self.hidden // self.heads)
        self.divisor = 1
        while head_dim // (2 * self.divisor) >= self.sizes["head_dim"]:
            self.divisor *= 2
        product = self.head_count(self.heads) * self.head_dim(head_dim)
        new = product * self.hidden / (self.heads * head_dim)
        self.new_hidden = int(new) if new % 8 == 0 else max(32, 16 * round(new / 16))
        if hidden:
            self.whole.hidden_sizes.setdefault(hidden, self.new_hidden)
        self.subs = {n: _Part(v, sizes, self.whole) for n, v in sub_configs.items()}

    def count(self, pattern: str, name: str = "") -> int:
        """Return the first count that goes by the name, or by a name like that; 0 if none does."""
        name = self.config.attribute_map.get(name, name)
        names = [name, *(n for n in self.values if re.search(pattern, n))]
        computed = None if name in self.values else getattr(self.config, name or "_", None)
        for value in [*map(self.values.get, names), computed]:
            value = max(value, default=0) if isinstance(value, list) else value
            if type(value) is int and value > 0:
                return value
        return 0

    def head_count(self, value: int) -> int:
        """Powers of two, so that every count of heads divides the larger ones."""
        if value < self.heads:
            return min(value, self.sizes["heads"] // 2)
        return min(value, self.sizes["heads"] * (2 if value >= 2 * self.heads else 1))

    def head_dim(self, value: int) -> int:
        """All over the same divisor, so that sums of them stay sums."""
        return value if self.divisor == 1 else max(4, 4 * round(value / self.divisor / 4))

    def mamba_head_dim(self, value: int) -> int:
        """Keep what heads times their size are of the hidden size."""
        heads = self.count("mamba.*heads$") or self.heads
        return self.width(value * heads) // self.head_count(heads)

    def width(self, value: int) -> int:
        """Keep the proportion to the hidden size; another part's hidden size follows that part."""
        if value != self.hidden and value in self.whole.hidden_sizes:
            return self.whole.hidden_sizes[value]
        new = value * self.new_hidden / self.hidden
        new = new if value % self.hidden == 0 else max(8, 8 * round(new / 8))
        return int(min(value, new, _MAX_WIDTH))

    def token_id(self, value: int) -> int:
        """Move an id into the small vocabulary, to the same place in every part."""
        moved, first = self.whole.token_ids, _FIRST_MOVED_ID
        return value if value < first else moved.setdefault(value, first + len(moved))

    def small(self) -> dict[str, Any]:
        """Return the arguments that make the small config."""
        layers = self._choose() if self.depth else ()
        picked = {n: self._pick(n, v, layers) for n, v in self.values.items()}
        small = {n: self._value(n, v) for n, v in picked.items()}
        # The two options that a config holds but does not write out.
        small["attn_implementation"] = self.config._attn_implementation
        small["experts_implementation"] = self.config._experts_implementation
        return small | {n: sub.small() for n, sub in self.subs.items()}

    def _choose(self) -> Sequence[int]:
        """Return the old layers that the new ones are copies of, in order."""
        every, values = range(self.depth), self.values.items()
        marks = [[str(self._pick(n, v, [i])) for i in every] for n, v in values]
        # A list that differs in many layers holds sizes rather than kinds.
        kinds = list(zip(*(m for m in marks if len({*m}) <= _MAX_KINDS), strict=True))
        rank = [min(kinds[:i].count(kind), 2) for i, kind in enumerate(kinds)]
        twice = len(rank) - rank.count(2)
        count = max(_MIN_LAYERS, twice if twice <= _MAX_LAYERS else rank.count(0))
        for name, value in values:
            if re.search(_PERIOD, name) and type(value) is int and value <= self.depth:
                count = max(count, min(value, _MAX_LAYERS))
        if self.config is self.whole.config.get_text_config(decoder=True):
            count = self.sizes["layers"] or count
        if count > self.depth:
            return [i * self.depth // count for i in range(count)]
        return sorted(sorted(every, key=rank.__getitem__)[:count])

    def _pick(self, name: str, value: Any, layers: Sequence[int]) -> Any:
        """Say of some layers what the value says of all, if it is about layers."""
        if not layers:
            return value
        if type(value) is int and value > 0 and re.search(_LAYER_COUNT, name):
            return sum(i in self._counted(name, value) for i in layers)
        if "layer" in name and isinstance(value, dict) and all(str(k).isdigit() for k in value):
            at = {int(key): v for key, v in value.items()}
            return {new: at[old] for new, old in enumerate(layers) if old in at}
        if isinstance(value, str) and len(value) == self.depth and "pattern" in name:
            return "".join(value[i] for i in layers)
        if not isinstance(value, list):
            return value
        first = self.sizes["first"]
        numbers = [i for i in range(first, first + self.depth) if i in value]
        if value == numbers and re.search(_LAYER_INDICES, name):
            return [first + new for new, old in enumerate(layers) if first + old in value]
        per_layer = len(value) == self.depth and (len(value) > 8 or re.search(_PER_LAYER, name))
        return [value[i] for i in layers] if per_layer else value

    def _counted(self, name: str, value: int) -> range:
        """Return the layers that a count of layers is about: the first, the last or a section."""
        counts = {n: v for n, v in self.values.items() if type(v) is int}
        sections = {n: v for n, v in counts.items() if re.search(_SECTION, n)}
        start = max(0, self.depth - value) if "shared" in name else 0
        if name in sections and sum(sections.values()) == self.depth:
            start = sum(list(sections.values())[: list(sections).index(name)])
        return range(start, start + value)

    def _value(self, name: str, value: Any) -> Any:
        """Make what is left small, by its name."""
        if isinstance(value, dict):
            return {key: self._value(str(key), v) for key, v in value.items()}
        if isinstance(value, list):
            if re.search("^(long|short)_factor$", name):
                return value[: self.head_dim(2 * len(value)) // 2]
            if name.endswith("_section"):
                size, parts = self.head_dim(2 * sum(value)) // 2, len(value)
                if size < parts:
                    raise ValueError(f"a head of {2 * size} cannot hold {parts} rotary sections")
                return [size // parts + (i < size % parts) for i in range(parts)]
            return [self._value(name, v) for v in value]
        if type(value) is not int or value <= 0:
            return value
        rules = (rule for pattern, rule in _RULES if re.search(pattern, name))
        return next(rules, lambda _, v: v)(self, value)


_DEPTH = r"^(num|n)_((hidden|decoder|transformer)_)?(layers?|blocks)$|^(decoder_layers|depth)$"
_HEADS = r"heads?(_per_layer)?$|query_group(s|_num)$"
_QUERY_HEADS = rf"^(?!.*(kv|key)).*({_HEADS})"
_HIDDEN = r"^(hidden_size|d_model|n_embd|emb(edding)?_dim|(hidden|model)_dim)$"
_LAYER_COUNT = (
    r"first_k|^(depth|num_blocks)$|^(?!.*(mtp|predict|every|per_)).*layers?(_(index|start|end))*$"
)
_LAYER_INDICES = r"(layers?|blocks?|idxs?|indices|indexes|(?<!token_)ids)$"
_PER_LAYER = r"layer|pattern|types$|block|size|dim|heads"
_SECTION = r"^(num|n)_(?!hidden_)[a-z]+_layers$"
_PERIOD = r"period$|interval$|every|freq|_step$|pattern"
_POSITIONS = r"max_position|positions$|^n_ctx$|seq_len(gth)?$|(max|context)_length$"
_WINDOW = "window|chunk_(size|len)|block_size|local_att|floor|_extent$|budget|compress(ed_|_r)"
_AS_IS = f"{_PERIOD}|image|patch_|kernel|crop|merge|stride|mel_|scalar|^(input|feature)_size$"

# The first pattern that the name of a positive count matches tells what becomes of it.
_RULES: tuple[tuple[str, Callable[[_Part, int], int]], ...] = (
    (r"(tokens?|mask|unk|pad|bos|eos|sep|cls)_(ids?|index)$", _Part.token_id),
    ("vocab", lambda p, v: min(v, _VOCAB)),
    ("layers_per_", lambda p, v: min(v, p.sizes["block"])),
    (f"{_LAYER_COUNT}|{_AS_IS}", lambda p, v: v),
    (r"index_(top_?k|kpool)$|topk_blocks$", lambda p, v: min(v, p.sizes["window"] // 2)),
    (r"^topk_groups?$", lambda p, v: 1),
    (r"per_tok(en)?$|top_?k(_experts)?$|moe_k$", lambda p, v: min(v, p.sizes["top_k"])),
    (r"^(?!.*shared).*(experts?|expert_num|centroids)$", lambda p, v: min(v, p.sizes["experts"])),
    (f"original_({_POSITIONS})", lambda p, v: min(v, _VOCAB // 2)),
    (_POSITIONS, lambda p, v: min(v, _VOCAB) if p.is_text else v),
    (_WINDOW, lambda p, v: min(v, p.sizes["window"]) if p.is_text else v),
    (r"mamba.*(d_head|head_?dim)$", _Part.mamba_head_dim),
    (r"head_?(dim|size)$|d_(head|kv)$|dim_head$|kv_channels$|rotary_dim$", _Part.head_dim),
    (_HEADS, _Part.head_count),
    (r"groups?$", lambda p, v: min(v, 2)),
    (r"multiple_of$|divisible_by$", lambda p, v: min(v, 8)),
    (r"size|dim|width|rank|embd|inner|channel|d_(model|ssm|state|rel)|ff$|ffn$", _Part.width),
)
