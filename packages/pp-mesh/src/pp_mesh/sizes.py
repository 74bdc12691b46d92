"""Sizes of the parallel dimensions and how they fill the ranks of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

_FACTORS = ("cp_ring_size", "cp_ulysses_size")
_INFERRED = ("dp_size", *_FACTORS)


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks each kind of parallelism gets.

    None, "none", 0 and -1, as YAML files write "unset", mean: infer it (`dp_size`, and either
    factor of `cp_size` from the other), or 1 (every other size).
    """

    pp_size: int = 1
    """Pipeline stages run in parallel: ranks that hold different layers."""

    dp_size: int | None = None
    """Ranks that see different data; None: what the other sizes leave of the world."""

    dp_replicate_size: int = 1
    """Of those, copies of the whole model; the rest of `dp_size` shards each copy."""

    tp_size: int = 1
    """Ranks that share each layer's matrices."""

    cp_size: int = 1
    """Ranks that share each sequence."""

    ep_size: int = 1
    """Ranks that hold different experts; carved out of DP x CP (x TP), not multiplied in."""

    cp_ring_size: int | None = None
    """Factor of `cp_size`: ranks that pass keys and values around a ring."""

    cp_ulysses_size: int | None = None
    """Factor of `cp_size`: ranks that exchange sequence parts for heads (all-to-all), the
    nearer neighbours. Both None: the axis is not split, its consumer uses all of it."""

    @property
    def dp_shard_size(self) -> int:
        """Ranks that shard one copy of the model; of resolved sizes only."""
        return self._resolved_dp // self.dp_replicate_size

    @property
    def experts_span_tp(self) -> bool:
        """Whether EP runs over TP too, because it does not divide DP x CP; resolved sizes only."""
        return self._resolved_dp * self.cp_size % self.ep_size != 0

    @property
    def _resolved_dp(self) -> int:
        if self.dp_size is None:
            raise RuntimeError("dp_size is not known yet: call resolve(world_size) first")
        return self.dp_size

    def resolve(self, world_size: int) -> ParallelSizes:
        """Infers what is unset and checks that the sizes fill the world.

        PP x DP x CP x TP must be the world size, `dp_replicate_size` must divide DP, the ring
        and Ulysses factors, if given, must multiply to CP, and EP must divide DP x CP or else
        DP x CP x TP: experts are spread over TP ranks only where DP x CP alone does not divide.

        Args:
            world_size: Number of ranks to lay out.

        Returns:
            Sizes that are all positive integers; both factors of CP are None if neither is set.

        Raises:
            TypeError: A size is not an integer.
            ValueError: A size is negative, or the sizes do not fit; the message tells all
                problems, those of type too.
        """
        wrong_type, wrong_value = self._malformed(world_size)
        if wrong_type or wrong_value:
            kind = TypeError if wrong_type else ValueError
            raise kind(_listing("these sizes make no sense", wrong_type + wrong_value))
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = {
            name: 1 if _is_unset(value) else value
            for name, value in given.items()
            if not (name in _INFERRED and _is_unset(value))
        }
        problems = _infer_dp(sizes, world_size) + _infer_factors(sizes)
        if "dp_size" in sizes:
            problems += _division_problems(sizes)
        if problems:
            raise ValueError(_listing(f"these sizes do not fit {world_size} ranks", problems))
        return ParallelSizes(**sizes)

    def _malformed(self, world_size: int) -> tuple[list[str], list[str]]:
        wrong_type, wrong_value = [], []
        for field in fields(self):
            value = getattr(self, field.name)
            if _is_unset(value):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                wrong_type.append(f"{field.name}={value!r} must be an integer, or None when unset")
            elif value < 0:
                wrong_value.append(f"{field.name}={value} must be positive, or None when unset")
        if not isinstance(world_size, int) or isinstance(world_size, bool):
            wrong_type.append(f"world_size={world_size!r} must be an integer")
        elif world_size < 1:
            wrong_value.append(f"world_size={world_size} must be at least 1")
        return wrong_type, wrong_value


def _is_unset(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() == "none"
    return value is None or (type(value) is int and value in (0, -1))


def _infer_dp(sizes: dict[str, int], world_size: int) -> list[str]:
    """Sets `dp_size` where it is missing; returns why the sizes do not fill the world."""
    pp, cp, tp = sizes["pp_size"], sizes["cp_size"], sizes["tp_size"]
    rest = pp * cp * tp
    if "dp_size" not in sizes:
        if world_size % rest == 0:
            sizes["dp_size"] = world_size // rest
            return []
        return [
            f"PP {pp} x CP {cp} x TP {tp} = {rest} does not divide the world size {world_size}, "
            f"so no dp_size fits: change one of them, or start a multiple of {rest} ranks"
        ]
    dp_size = sizes["dp_size"]
    total = rest * dp_size
    if total == world_size:
        return []
    fit = f"set dp_size to {world_size // rest} or None, or " if world_size % rest == 0 else ""
    return [
        f"PP {pp} x DP {dp_size} x CP {cp} x TP {tp} = {total}, but the world size is "
        f"{world_size}: {fit}start {total} ranks"
    ]


def _infer_factors(sizes: dict[str, int]) -> list[str]:
    """Sets the factor of `cp_size` missing beside the other; returns why they do not fit."""
    given = [name for name in _FACTORS if name in sizes]
    if not given:
        return []
    cp, product = sizes["cp_size"], math.prod(sizes[name] for name in given)
    if len(given) == 2 and product != cp:
        factors = " x ".join(f"{name} {sizes[name]}" for name in given)
        return [
            f"{factors} = {product}, but cp_size is {cp}: set cp_size to {product}, or choose "
            f"factors whose product is {cp}"
        ]
    if cp % product:
        return [f"{given[0]} {product} does not divide cp_size {cp}: choose a divisor of {cp}"]
    for name in _FACTORS:
        sizes.setdefault(name, cp // product)
    return []


def _division_problems(sizes: dict[str, int]) -> list[str]:
    problems = []
    names = ("dp_size", "dp_replicate_size", "cp_size", "tp_size", "ep_size")
    dp, replicate, cp, tp, ep = (sizes[name] for name in names)
    if dp % replicate:
        problems.append(
            f"dp_replicate_size {replicate} does not divide DP {dp}: choose a divisor of {dp}"
        )
    if dp * cp % ep and dp * cp * tp % ep:
        problems.append(
            f"ep_size {ep} divides neither DP {dp} x CP {cp} = {dp * cp} nor that x TP {tp} = "
            f"{dp * cp * tp}: choose a divisor of {dp * cp * tp}"
        )
    return problems


def _listing(headline: str, problems: list[str]) -> str:
    return "\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)])
