import itertools

import pytest

from pp_mesh import ParallelSizes

SMALL = (1, 2, 3, 4)


def fits(world: int, pp: int, dp: int | None, rep: int, tp: int, cp: int, ep: int) -> bool:
    """Says by trying every DP size whether there is a layout."""
    candidates = range(1, world + 1) if dp is None else [dp]
    return any(
        pp * d * cp * tp == world
        and d % rep == 0
        and any(room % ep == 0 for room in (d * cp, d * cp * tp))
        for d in candidates
    )


@pytest.mark.parametrize("world", [1, 2, 6, 8, 12, 16, 24])
def test_resolve_agrees_with_trying_everything(world: int) -> None:
    for pp, dp, rep, tp, cp, ep in itertools.product(
        SMALL, (None, *SMALL), (1, 2, 3), (1, 2, 3), (1, 2), SMALL
    ):
        sizes = ParallelSizes(pp, dp, rep, tp, cp, ep)
        if fits(world, pp, dp, rep, tp, cp, ep):
            resolved = sizes.resolve(world)
            assert resolved.dp_size is not None
            assert pp * resolved.dp_size * cp * tp == world
            assert resolved.dp_shard_size * rep == resolved.dp_size
            assert resolved.experts_span_tp == bool(resolved.dp_size * cp % ep)
            assert resolved.resolve(world) == resolved
        else:
            with pytest.raises(ValueError, match=f"do not fit {world} ranks"):
                sizes.resolve(world)


@pytest.mark.parametrize("cp", [1, 2, 4, 6, 12])
def test_factors_of_cp_agree_with_trying_everything(cp: int) -> None:
    pairs = [(ring, ulysses) for ring in range(1, 13) for ulysses in range(1, 13)]
    for ring, ulysses in itertools.product((None, *range(1, 13)), repeat=2):
        sizes = ParallelSizes(pp_size=2, cp_size=cp, cp_ring_size=ring, cp_ulysses_size=ulysses)
        fitting = [
            pair
            for pair in pairs
            if pair[0] * pair[1] == cp and ring in (None, pair[0]) and ulysses in (None, pair[1])
        ]
        if not fitting:
            with pytest.raises(ValueError, match=f"cp_size (is )?{cp}: .*{cp}"):
                sizes.resolve(24)
            continue
        resolved = sizes.resolve(24)
        factors = resolved.cp_ring_size, resolved.cp_ulysses_size
        assert factors == ((None, None) if ring is None is ulysses else fitting[0])
        assert resolved.resolve(24) == resolved


@pytest.mark.parametrize("unset", [None, "none", "None", 0, -1])
def test_every_spelling_of_unset(unset: int) -> None:
    sizes = ParallelSizes(*[unset] * 8).resolve(8)
    assert sizes == ParallelSizes(1, 8, 1, 1, 1, 1, None, None)
    sizes = ParallelSizes(cp_size=4, cp_ring_size=unset, cp_ulysses_size=2).resolve(8)
    assert sizes == ParallelSizes(1, 2, 1, 1, 4, 1, 2, 2)


def test_an_explicit_dp_size_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"PP 2 x DP 2 .* = 4, but the world size is 8.*to 4 or"):
        ParallelSizes(pp_size=2, dp_size=2).resolve(8)


def test_all_problems_at_once() -> None:
    sizes = ParallelSizes(
        pp_size=3, dp_size=4, dp_replicate_size=3, ep_size=5, cp_ring_size=2, cp_ulysses_size=3
    )
    with pytest.raises(ValueError, match="world size is 8") as caught:
        sizes.resolve(8)
    message = str(caught.value)
    assert "dp_replicate_size 3 does not divide DP 4" in message
    assert "ep_size 5 divides neither DP 4 x CP 1 = 4" in message
    assert "start 12 ranks" in message
    assert "cp_ring_size 2 x cp_ulysses_size 3 = 6, but cp_size is 1: set cp_size to 6" in message
    with pytest.raises(ValueError, match=r"PP 3 .* no dp_size fits[\s\S]*_ring_size 2 does not"):
        ParallelSizes(pp_size=3, cp_ring_size=2).resolve(8)


@pytest.mark.parametrize("bad", [2.0, "2", True, [2]])
def test_not_an_integer(bad: int) -> None:
    with pytest.raises(TypeError, match=r"tp_size=.* integer[\s\S]*cp_size=-3"):
        ParallelSizes(tp_size=bad, cp_size=-3).resolve(8)


def test_negative() -> None:
    with pytest.raises(ValueError, match=r"pp_size=-2 must be positive[\s\S]*dp_size=-4"):
        ParallelSizes(pp_size=-2, dp_size=-4).resolve(8)
    with pytest.raises(ValueError, match="world_size=0"):
        ParallelSizes().resolve(0)


def test_unresolved_sizes_say_so() -> None:
    with pytest.raises(RuntimeError, match="resolve"):
        _ = ParallelSizes().dp_shard_size
