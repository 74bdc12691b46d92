from collections.abc import Iterator
from random import Random

import pytest

from pp_schedule import Balance, balance, stage_ids_this_rank


def splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 1:
        yield (num_layers,)
        return
    for count in range(num_layers + 1):
        for rest in splits(num_layers - count, num_stages - 1):
            yield (count, *rest)


def rank_loads(
    counts: tuple[int, ...], layers: list[float], first: float, last: float, p: int, style: str
) -> list[float]:
    """Weighed without the code under test."""
    left = list(layers)
    stages = [sum(left.pop(0) for _ in range(count)) for count in counts]
    stages[0] += first
    stages[-1] += last
    return [sum(stages[s] for s in stage_ids_this_rank(r, p, len(counts), style)) for r in range(p)]


def random_model(random: Random) -> tuple[list[float], float, float]:
    kinds = random.choice([[1.0], [1.0, 2.0, 5.0], [1.0, 1.7], None])
    layers = [
        random.choice(kinds) if kinds else random.random() for _ in range(random.randint(0, 8))
    ]
    return (
        layers,
        random.choice([0.0, 3 * random.random()]),
        random.choice([0.0, 6 * random.random()]),
    )


@pytest.mark.parametrize("case", range(150))
def test_against_every_split(case: int) -> None:
    random = Random(case)
    layers, first, last = random_model(random)
    p = random.randint(1, 4)
    loads = {c: rank_loads(c, layers, first, last, p, "loop") for c in splits(len(layers), p)}
    counts = balance(layers, first, last, p)
    best = min(map(max, loads.values()))
    assert max(loads[counts]) == pytest.approx(best)
    squares = [sum(x * x for x in each) for each in loads.values() if max(each) <= best + 1e-9]
    assert sum(x * x for x in loads[counts]) == pytest.approx(min(squares))
    assert counts == balance(list(layers), first, last, p)


@pytest.mark.parametrize("case", range(150))
def test_several_stages_per_rank_against_every_split(case: int) -> None:
    random = Random(case)
    layers, first, last = random_model(random)
    p, style = random.choice([(1, "v"), (2, "v"), (1, "loop"), (2, "loop")])
    loads = {c: rank_loads(c, layers, first, last, p, style) for c in splits(len(layers), 2 * p)}
    counts = balance(layers, first, last, 2 * p, p, style)
    assert max(loads[counts]) == pytest.approx(min(map(max, loads.values())))


@pytest.mark.parametrize("case", range(20))
def test_equal_layers_on_three_stages_per_rank(case: int) -> None:
    random = Random(case)
    layers = [1.0] * random.randint(0, 9)
    first, last = random.random(), 4 * random.random()
    loads = [rank_loads(c, layers, first, last, 2, "loop") for c in splits(len(layers), 6)]
    counts = balance(layers, first, last, 6, 2)
    found = max(rank_loads(counts, layers, first, last, 2, "loop"))
    assert found == pytest.approx(min(map(max, loads)))


@pytest.mark.parametrize(("pp_size", "style"), [(8, "loop"), (8, "v"), (16, "loop")])
def test_a_hundred_uneven_layers(pp_size: int, style: str) -> None:
    random = Random(1)
    layers = [random.choice([1.0, 1.7, 3.2]) for _ in range(100)]
    counts = balance(layers, 1.0, 5.0, 16, pp_size, style)
    weighed = Balance.of(counts, layers, 1.0, 5.0, pp_size, style)
    assert sum(counts) == 100
    assert weighed.ratio < (1.01 if pp_size == 8 else 1.1)
    assert weighed.ratio < weighed.even_ratio


def test_slack_buys_even_stages() -> None:
    random = Random(1)
    layers = [random.choice([1.0, 1.7, 3.2]) for _ in range(60)]

    def split(slack: float) -> tuple[float, int]:
        counts = balance(layers, 0.0, 0.0, 12, 6, slack=slack)
        return Balance.of(counts, layers, 0.0, 0.0, 6).ratio, max(counts) - min(counts)

    (strict, strict_range), (loose, loose_range) = split(0.0), split(0.05)
    assert strict <= loose <= strict * 1.05 + 1e-9
    assert loose_range <= strict_range


@pytest.mark.parametrize(
    ("num_layers", "first", "last", "num_stages", "counts"),
    [
        (30, 0, 0, 4, (8, 8, 7, 7)),  # even: the earlier stages take the remainder
        (24, 0, 8, 4, (8, 8, 8, 0)),  # the head alone
        (6, 0, 2, 4, (2, 2, 2, 0)),
        (3, 0, 0, 5, (1, 1, 1, 0, 0)),
        (0, 1, 1, 3, (0, 0, 0)),
        (4, 10, 0, 3, (0, 2, 2)),
    ],
)
def test_by_hand(
    num_layers: int, first: float, last: float, num_stages: int, counts: tuple[int, ...]
) -> None:
    assert balance([1.0] * num_layers, first, last, num_stages) == counts


def test_a_v_puts_both_ends_on_rank_0() -> None:
    counts = balance([1.0] * 14, 1.0, 1.0, 4, pp_size=2, style="v")
    assert counts[0] + counts[3] == 6
    assert counts[1] + counts[2] == 8


def decoder_flops(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> float:
    """FLOPs per token of a layer's forward, sequence 4096: twice each weight, and attention."""
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    attention = heads * head_dim * 4096  # scores and values, half of it masked
    return 2.0 * (projections + 3 * hidden * inner + attention)


@pytest.mark.parametrize(
    ("num_layers", "hidden", "layer", "vocabulary", "p", "most", "even"),
    [
        # Qwen2.5-0.5B, Llama-3.2-1B, Qwen3-8B, from their public configs.
        (24, 896, decoder_flops(896, 14, 2, 64, 4864), 151936, 4, 1.03, 1.70),
        (16, 2048, decoder_flops(2048, 32, 8, 64, 8192), 128256, 4, 1.02, 1.57),
        (36, 4096, decoder_flops(4096, 32, 8, 128, 12288), 151936, 8, 1.04, 1.43),
    ],
)
def test_public_models(
    num_layers: int,
    hidden: int,
    layer: float,
    vocabulary: int,
    p: int,
    most: float,
    even: float,
) -> None:
    head = 2.0 * hidden * vocabulary
    layers = [layer] * num_layers
    weighed = Balance.of(balance(layers, 0.0, head, p), layers, 0.0, head)
    assert weighed.ratio <= most
    assert weighed.even_ratio == pytest.approx(even, abs=0.02)


def test_the_report_says_what_no_split_can_change() -> None:
    layers = [1.0] * 24
    weighed = Balance.of(balance(layers, 0.0, 8.0, 8), layers, 0.0, 8.0)
    assert weighed.heaviest == 8.0
    assert weighed.ideal == 4.0
    assert weighed.even_counts == (3,) * 8
    assert weighed.even_ratio == 11 / 4
    assert "the last stage's own part alone is 2.00 x" in str(weighed)
    layers = [1.0] * 64
    assert "alone" not in str(Balance.of(balance(layers, 0.0, 8.0, 8), layers, 0.0, 8.0))


def test_what_cannot_be_balanced() -> None:
    with pytest.raises(ValueError, match="cannot balance") as error:
        balance([1.0, -1.0], float("inf"), 0.0, 0)
    for part in ("layer_costs[1] -1.0", "first_cost inf", "num_stages=0"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="not a positive multiple of pp_size=3"):
        balance([1.0], 0.0, 0.0, 4, pp_size=3)
