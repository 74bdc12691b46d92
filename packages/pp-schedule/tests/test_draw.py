import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pp_schedule import Action, StageCosts, Timeline, draw_png, draw_text, simulate
from pp_schedule.orders import breadth_first_order, gpipe_order, one_f_one_b_order


def test_text_by_hand() -> None:
    assert draw_text(one_f_one_b_order(2, 2)).splitlines() == [
        "rank 0 F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 .  F0 B0 -- F1 B1 -- .  .",
    ]


def test_text_names_the_stage_where_a_rank_has_several() -> None:
    lines = draw_text(breadth_first_order({0: [0, 2], 1: [1]}, 1)).splitlines()
    assert lines[0].split() == [
        "rank",
        "0",
        "0F0",
        ".",
        "2F0",
        "2B0",
        "---",
        ".",
        ".",
        "0B0",
        "---",
    ]
    assert lines[1].split()[2:4] == [".", "1F0"]


def test_text_shows_split_backwards() -> None:
    order = {0: [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)]}
    text = draw_text(order, StageCosts(1.0, 1.0, 1.0))
    assert "F0" in text
    assert "W0" in text


def test_text_is_cut_to_the_width() -> None:
    order = gpipe_order(4, 16)  # 57 units of time, each as wide as "F15 "
    text = draw_text(order, width=60)
    lines = text.splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert lines[-1] == "(and 44 more units of time)"
    assert len(draw_text(order, width=1000).splitlines()) == 4


def test_text_measures_time_in_the_shortest_action() -> None:
    text = draw_text({0: [Action(0, "F", 0), Action(0, "B", 0)]}, StageCosts(0.5, 1.0, 0.5))
    assert text == "rank 0 F0 B0 -- --"


def test_text_of_uneven_times_fits_the_width() -> None:
    costs = StageCosts([1.0, 1.37, 0.91, 1.2], 1.1, 0.6)
    lines = draw_text(simulate(one_f_one_b_order(4, 8), costs), width=120).splitlines()
    assert len(lines) == 4
    assert all(40 < len(line) <= 120 for line in lines)
    assert lines[3].split()[2:5] == [".", ".", "."]
    assert len(draw_text(one_f_one_b_order(4, 8), costs, width=120, unit=0.5).splitlines()) == 5


def test_text_of_a_timeline_is_that_of_its_order() -> None:
    order = one_f_one_b_order(3, 5)
    assert draw_text(simulate(order)) == draw_text(order)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no actions"):
        draw_text(Timeline((), 0.0, (0.0,)))


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", data[16:24])


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    draw_png(one_f_one_b_order(2, 2), small)
    draw_png(one_f_one_b_order(8, 32), large, StageCosts(1.0, 2.0, 1.0), title="1f1b")
    width, height = png_size(small)
    assert (width, height) == (8 * 120, round((1.4 + 2 * 0.55) * 120))
    assert png_size(large)[0] > 3 * width
    assert png_size(large)[1] > 2 * height


def test_png_of_a_measured_run_is_as_large_as_that_of_its_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    order = one_f_one_b_order(4, 16)
    draw_png(order, tmp_path / "order.png")
    draw_png(simulate(order, StageCosts(1e-3, 1e-3, 1e-3)), tmp_path / "measured.png")
    assert png_size(tmp_path / "measured.png") == png_size(tmp_path / "order.png")


def test_png_with_actions_that_take_no_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    order = {0: [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)]}
    draw_png(order, str(tmp_path / "split.png"))
    assert png_size(tmp_path / "split.png")[0] == 8 * 120


def test_png_leaves_the_programs_own_figures_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys\n"
        "from pp_schedule import draw_png\n"
        "from pp_schedule.orders import gpipe_order\n"
        "draw_png(gpipe_order(2, 2), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pp-schedule\[plot\]"):
        draw_png(gpipe_order(2, 2), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_an_order_that_takes_no_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no action takes any time"):
        draw_text(gpipe_order(2, 2), StageCosts(0.0, 0.0, 0.0))
