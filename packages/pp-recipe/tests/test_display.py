import io
import re

from rich.console import Console

from pp_autopipeline import StageSummary
from pp_recipe import TrainOptions, display
from pp_schedule.orders import one_f_one_b_order


def console():
    return Console(file=io.StringIO(), width=110)


def test_the_table_has_a_line_per_stage():
    out = console()
    stages = [
        StageSummary(
            0, 0, ("model.embed_tokens", "model.layers.0", "model.layers.1"), 3000, 3000, 0.75
        ),
        StageSummary(1, 1, ("model.layers.2", "lm_head"), 1000, 1000, 0.25),
    ]
    display.show_stages(out, stages)
    text = out.file.getvalue()
    assert "2 stages, 4,000 parameters" in text
    assert re.search(r"0 +│ +0 +│ model.embed_tokens, model.layers.0-1 +│ +3,000 +│ 75.0%", text)


def test_the_schedule_comes_with_its_bubble():
    out = console()
    display.show_schedule(out, TrainOptions(), one_f_one_b_order(2, 8))
    text = out.file.getvalue()
    assert "8 microbatches of 1" in text
    assert "11.1%" in text
    assert "rank 1" in text


def test_progress_is_lines_where_there_is_no_terminal():
    out = console()
    progress = display.StepProgress(out, steps=20)
    with progress.shown():
        for step in range(1, 21):
            progress.advance(step, loss=5.0 / step, speed=1234.5, seconds=0.1)
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("step 1/20  loss 5.000  1,234 tokens/s")
    assert lines[-1].startswith("step 20/20  loss 0.250")


def test_the_result_tells_what_to_try_next():
    out = console()
    display.show_result(out, TrainOptions(output="o"), 5.5, 2.1, "words [not markup]")
    text = out.file.getvalue()
    assert "words [not markup]" in text
    assert "--model o/checkpoint" in text
    assert "5.500" in text
    assert "2.100" in text
