import re

import pytest

from pp_schedule import calculate_virtual_stages, stage_ids_this_rank


@pytest.mark.parametrize("pp_size", range(1, 9))
@pytest.mark.parametrize("per_rank", range(1, 5))
def test_loop_places_every_stage_once_round_by_round(pp_size: int, per_rank: int) -> None:
    num_stages = pp_size * per_rank
    placed = [stage_ids_this_rank(rank, pp_size, num_stages) for rank in range(pp_size)]
    assert sorted(stage for ids in placed for stage in ids) == list(range(num_stages))
    for rank, ids in enumerate(placed):
        assert len(ids) == per_rank
        assert [stage % pp_size for stage in ids] == [rank] * per_rank
        assert list(ids) == sorted(ids)


@pytest.mark.parametrize("pp_size", range(1, 9))
def test_v_goes_down_and_back_up(pp_size: int) -> None:
    placed = [stage_ids_this_rank(rank, pp_size, 2 * pp_size, "v") for rank in range(pp_size)]
    down = [ids[0] for ids in placed]
    up = [ids[1] for ids in reversed(placed)]
    assert down + up == list(range(2 * pp_size))


def test_the_guides_examples() -> None:
    assert stage_ids_this_rank(pp_rank=0, pp_size=4, num_stages=8, style="loop") == (0, 4)
    assert stage_ids_this_rank(pp_rank=0, pp_size=4, num_stages=8, style="v") == (0, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, 6), ["num_stages=6", "pp_size=4", "use 4 or 8"]),
        ((0, 4, 0), ["num_stages=0", "use 4 or 8"]),
        ((0, 4, 3), ["num_stages=3", "use 4 or 8"]),
        ((4, 4, 4), ["pp_rank=4", "0..3"]),
        ((-1, 4, 4), ["pp_rank=-1", "0..3"]),
        ((0, 0, 4), ["pp_size=0", "at least 1"]),
        ((0, 4, 4, "v"), ["2 stages per rank", "num_stages=8, not 4"]),
        ((0, 4, 12, "v"), ["2 stages per rank", "num_stages=8, not 12"]),
        ((0, 2, 4, "V"), ["style='V'", "'loop'", "'v'"]),
        ((7, 4, 6, "w"), ["pp_rank=7", "num_stages=6", "style='w'"]),
    ],
)
def test_places_that_do_not_exist(arguments: tuple[int, int, int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot place stages") as caught:
        stage_ids_this_rank(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_v_is_never_told_to_use_another_number_than_two_per_rank() -> None:
    with pytest.raises(ValueError, match="cannot place stages") as caught:
        stage_ids_this_rank(0, 4, 6, "v")
    assert "8" in str(caught.value)
    assert "use 4" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_layers", "layers_per_stage", "pp_size", "single", "rounding", "wanted"),
    [
        # Nothing asked for: one stage per rank, or two.
        (32, None, 4, True, None, (4, 1)),
        (32, None, 4, False, None, (8, 2)),
        (3, None, 4, False, None, (8, 2)),  # more stages than layers: some are empty
        (5, None, 1, True, None, (1, 1)),
        (32, None, 4, True, "up", (4, 1)),
        # An exact division, with rounding or without.
        (32, 8, 4, True, None, (4, 1)),
        (32, 4, 4, False, None, (8, 2)),
        (32, 4, 4, False, "up", (8, 2)),
        (32, 4, 4, False, "down", (8, 2)),
        (32, 1, 4, False, None, (32, 8)),
        # A last stage that is short counts as a stage.
        (30, 8, 4, True, None, (4, 1)),
        (15, 2, 4, False, None, (8, 2)),
        # Rounding.
        (32, 5, 4, False, "up", (8, 2)),  # 7 stages
        (36, 4, 4, False, "down", (8, 2)),  # 9 stages
        (36, 4, 4, False, "up", (12, 3)),
        (20, 4, 4, True, "down", (4, 1)),  # 5 stages
        (3, 1, 4, True, "up", (4, 1)),
        (5, 1, 2, False, "up", (6, 3)),
        (5, 1, 2, False, "down", (4, 2)),
    ],
)
def test_virtual_stages(
    num_layers: int,
    layers_per_stage: int | None,
    pp_size: int,
    single: bool,
    rounding: str | None,
    wanted: tuple[int, int],
) -> None:
    got = calculate_virtual_stages(num_layers, layers_per_stage, pp_size, single, rounding)
    assert got == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (32, 5, 4, False),
            ["num_layers=32", "layers_per_stage=5", "7 stages", "pp_size=4", "'up'"],
        ),
        ((3, 1, 4, True, "down"), ["makes 0 stages"]),
        ((32, 4, 4, True), ["2 stages per rank", "exactly 1", "layers_per_stage=8", "interleaved"]),
        ((32, 8, 4, False), ["1 stage per rank", "at least 2", "layers_per_stage"]),
        ((0, 0, 0, True, "near"), ["num_layers=0", "layers_per_stage=0", "pp_size=0", "'near'"]),
    ],
)
def test_layers_that_do_not_divide(arguments: tuple[int, int, int, bool], words: list[str]) -> None:
    with pytest.raises(ValueError, match="layers") as caught:
        calculate_virtual_stages(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("rounding", [None, "up", "down"])
@pytest.mark.parametrize("single", [True, False])
def test_what_an_error_advises_works(single: bool, rounding: str | None) -> None:
    advised = 0
    for pp_size in range(1, 6):
        for num_layers in range(1, 25):
            for layers_per_stage in range(1, num_layers + 2):
                sizes = (num_layers, layers_per_stage, pp_size, single, rounding)
                try:
                    calculate_virtual_stages(*sizes)
                except ValueError as error:
                    advice = re.search(r"set layers_per_stage=(\d+)", str(error)) or re.search(
                        r"layers_per_stage to at most (\d+)", str(error)
                    )
                    if advice:
                        advised += 1
                        better = int(advice[1])
                        calculate_virtual_stages(num_layers, better, pp_size, single, rounding)
    assert advised > 0
