import re
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from pp_schedule import SCHEDULE_NAMES, ScheduleSpec, resolve_schedule, stage_ids_this_rank
from pp_schedule.names import MicrobatchRule

CLASSES = {
    "Schedule1F1B": ["1f1b", "1F1B", "1-f-1-b", "schedule_1f1b"],
    "ScheduleGPipe": ["gpipe", "GPipe", "g_pipe", "ScheduleGpipe"],
    "ScheduleLoopedBFS": ["looped_bfs", "LoopedBFS", "looped-bfs", "LOOPED BFS"],
    "ScheduleInterleaved1F1B": [
        "interleaved_1f1b",
        "interleaved1f1b",
        "Interleaved1F1B",
        "interleaved-1F1B",
        "interleaved",
        "dfs",
        "DFS",
    ],
    "ScheduleInterleavedZeroBubble": [
        "zero_bubble",
        "ZeroBubble",
        "zero-bubble",
        "interleaved_zero_bubble",
        "InterleavedZeroBubble",
    ],
    "ScheduleZBVZeroBubble": ["zbv", "ZBV", "v_schedule", "V-Schedule", "ZBVZeroBubble"],
    "ScheduleDualPipeV": ["dualpipev", "DualPipeV", "dual_pipe_v"],
}
PAIRS = [(name, cls) for cls, names in CLASSES.items() for name in [cls, *names]]


@pytest.mark.parametrize(("name", "class_name"), PAIRS)
def test_every_spelling(name: str, class_name: str) -> None:
    spec = resolve_schedule(name)
    assert spec.cls is getattr(schedules, class_name)
    assert resolve_schedule(spec.name) == spec


def test_every_torch_schedule_has_a_name() -> None:
    public = {
        name
        for name, value in vars(schedules).items()
        if name.startswith("Schedule") and isinstance(value, type) and not value.__abstractmethods__
    }
    assert public == set(CLASSES)
    classes = {resolve_schedule(name).class_name for name in SCHEDULE_NAMES if name != "auto"}
    assert classes == public
    assert resolve_schedule("auto").cls is schedules._PipelineScheduleRuntime


@pytest.mark.parametrize("class_name", CLASSES)
def test_torch_understands_the_same_class_names(class_name: str) -> None:
    plain = class_name.removeprefix("Schedule")
    assert schedules.get_schedule_class(plain) is resolve_schedule(plain).cls


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("1f2b", "1f1b"),
        ("gpip", "gpipe"),
        ("interleved_1f1b", "interleaved_1f1b"),
        ("loopedbsf", "looped_bfs"),
        ("zero_bubbel", "zero_bubble"),
        ("vschedul", "v_schedule"),
        ("DualPipe", "dualpipev"),
    ],
)
def test_a_typo_gets_the_nearest_names(name: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match="did you mean") as caught:
        resolve_schedule(name)
    assert f"there is no schedule {name!r}" in str(caught.value)
    assert repr(suggestion) in str(caught.value).split("?")[0]


@pytest.mark.parametrize("name", ["", "quartz"])
def test_a_name_like_no_other_gets_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="known: 1f1b, gpipe") as caught:
        resolve_schedule(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime"]
)
def test_a_base_class_of_torch_is_no_schedule(name: str) -> None:
    assert hasattr(schedules, name)
    with pytest.raises(ValueError, match=r"base class of torch.*give a schedule file, or one of"):
        resolve_schedule(name)


def test_a_name_is_a_string() -> None:
    with pytest.raises(TypeError, match="string, not by int 1"):
        resolve_schedule(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "style", "per_rank", "splits"),
    [
        ("1f1b", "loop", 1, False),
        ("gpipe", "loop", 1, False),
        ("looped_bfs", "loop", None, False),
        ("dfs", "loop", None, False),
        ("zero_bubble", "loop", None, True),
        ("v_schedule", "v", 2, True),
        ("dualpipev", "v", 2, True),
    ],
)
def test_what_a_name_says(name: str, style: str, per_rank: int | None, splits: bool) -> None:
    spec = resolve_schedule(name)
    assert (spec.style, spec.stages_per_rank, spec.splits_backward) == (style, per_rank, splits)
    assert spec.single_stage == (per_rank == 1)


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_rules_are_those_of_the_torch_class(
    fake_stages: Callable[..., list[Any]], class_name: str, pp_size: int
) -> None:
    spec = resolve_schedule(class_name)
    for per_rank in [spec.stages_per_rank] if spec.stages_per_rank else [2, 3]:
        num_stages = pp_size * per_rank
        ids = stage_ids_this_rank(0, pp_size, num_stages, spec.style)
        stages = fake_stages(0, pp_size, ids, num_stages)
        for num_microbatches in range(1, 3 * pp_size + 1):
            problems = spec.check(pp_size, num_stages, num_microbatches)
            assert (problems == []) == spec.takes(pp_size, num_stages, num_microbatches)
            try:
                spec.cls(stages[0] if spec.single_stage else stages, num_microbatches)
            except ValueError:
                assert problems, f"torch refuses {num_microbatches} microbatches"
            else:
                assert not problems, f"torch takes {num_microbatches} microbatches"


@pytest.mark.parametrize(
    ("name", "pp_size", "num_stages", "num_microbatches", "rule", "nearest"),
    [
        ("1f1b", 4, 4, 3, "at least one microbatch per stage (4)", "4 and 5"),
        ("1f1b", 4, 4, 1, "at least one microbatch per stage (4)", "4 and 5"),
        ("dualpipev", 4, 8, 7, "at least two microbatches per rank (8)", "8 and 9"),
        ("interleaved_1f1b", 4, 8, 11, "whole rounds over pp_size=4", "10 and 12"),
        ("zero_bubble", 4, 8, 9, "whole rounds over pp_size=4", "8 and 10"),
        ("interleaved_1f1b", 3, 6, 7, "whole rounds over pp_size=3", "6 and 8"),
        ("gpipe", 4, 4, 0, "at least one microbatch", "1 and 2"),
        ("zbv", 4, 8, 0, "at least one microbatch", "1 and 2"),
    ],
)
def test_microbatches_that_do_not_suit(
    name: str, pp_size: int, num_stages: int, num_microbatches: int, rule: str, nearest: str
) -> None:
    spec = resolve_schedule(name)
    [problem] = spec.check(pp_size, num_stages, num_microbatches)
    assert rule in problem
    assert f"not {num_microbatches}" in problem
    assert re.findall(r"\d+", problem.partition("nearest")[2]) == re.findall(r"\d+", nearest)


@pytest.mark.parametrize("rule", ["any", "one per stage", "two per rank", "whole rounds"])
def test_the_nearest_numbers_are_taken(rule: MicrobatchRule) -> None:
    spec = ScheduleSpec("mine", "ScheduleGPipe", "loop", 2, False, rule)
    for pp_size in (1, 2, 3, 5):
        for num_microbatches in range(0, 4 * pp_size):
            for problem in spec.check(pp_size, 2 * pp_size, num_microbatches):
                near = [int(n) for n in re.findall(r"\d+", problem.partition("nearest")[2])]
                assert len(near) == 2
                assert all(spec.takes(pp_size, 2 * pp_size, n) for n in near)


@pytest.mark.parametrize(
    ("name", "num_stages", "words"),
    [
        ("1f1b", 8, ["exactly 1 stage per rank", "pp_size=4 needs 4 stages, not 8"]),
        ("zbv", 12, ["exactly 2 stages per rank", "pp_size=4 needs 8 stages, not 12"]),
        ("zbv", 4, ["exactly 2 stages per rank", "needs 8 stages, not 4"]),
        ("zbv", 6, ["exactly 2 stages per rank", "needs 8 stages, not 6"]),
        ("dfs", 6, ["6 stages do not divide over pp_size=4", "nearest: 4 or 8"]),
        ("dfs", 3, ["3 stages", "nearest: 4"]),
        ("dfs", 0, ["0 stages", "nearest: 4"]),
    ],
)
def test_stages_that_do_not_suit(name: str, num_stages: int, words: list[str]) -> None:
    [problem] = resolve_schedule(name).check(4, num_stages, 8)
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("name", "batch_size", "microbatch_size", "advice"),
    [
        ("1f1b", 8, 4, "rows / part = 8 / 4: use rows=16 or 20, or part=2"),
        ("1f1b", 3, 1, "rows / part = 3 / 1: use rows=4 or 5"),
        ("dualpipev", 16, 4, "rows / part = 16 / 4: use rows=32 or 36, or part=2"),
        ("dfs", 22, 2, "rows / part = 22 / 2: use rows=20 or 24, or part=11"),
    ],
)
def test_sizes_that_would_fit_in_the_users_names(
    name: str, batch_size: int, microbatch_size: int, advice: str
) -> None:
    spec = resolve_schedule(name)
    num_stages = 4 * (spec.stages_per_rank or 2)
    said = spec.fitting_sizes(4, num_stages, ("rows", batch_size), ("part", microbatch_size))
    assert said == f"microbatches are {advice}"


@pytest.mark.parametrize("name", ["1f1b", "dfs", "dualpipev"])
def test_sizes_that_are_advised_fit(name: str) -> None:
    spec = resolve_schedule(name)
    advised = 0
    for pp_size in (1, 2, 3, 5):
        num_stages = pp_size * (spec.stages_per_rank or 2)
        for part in (1, 2, 3):
            for rows in range(part, 8 * pp_size, part):
                if spec.takes(pp_size, num_stages, rows // part):
                    continue
                said = spec.fitting_sizes(pp_size, num_stages, ("rows", rows), ("part", part))
                batches, _, parts = said.partition("rows=")[2].partition(", or part=")
                for fitting in map(int, batches.split(" or ")):
                    assert fitting % part == 0
                    assert spec.takes(pp_size, num_stages, fitting // part)
                if parts:
                    assert rows % int(parts) == 0
                    assert spec.takes(pp_size, num_stages, rows // int(parts))
                advised += 1
    assert advised > 5
