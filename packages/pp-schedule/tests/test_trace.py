"""Trace files hold what Perfetto needs, and what the timeline has."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pp_schedule import StageCosts, chrome_trace, simulate
from pp_schedule.orders import breadth_first_order, one_f_one_b_order

ORDERS = {
    "1f1b": one_f_one_b_order(4, 6),
    "looped": breadth_first_order({0: [0, 2], 1: [1, 3]}, 3),
    "v": breadth_first_order({0: [0, 3], 1: [1, 2]}, 3),
}
COSTS = StageCosts(
    [1.0, 1.5, 1.0, 2.0],
    activation_bytes=8.0,
    parameter_bytes=100.0,
    boundary_bytes=4.0,
    bandwidth=8.0,
)


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        assert event["ph"] in {"M", "X", "s", "f", "C"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return events


@pytest.mark.parametrize("name", ORDERS)
def test_slices_are_the_spans(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    chrome_trace(ORDERS[name], path, COSTS, title=name)
    events = events_of(path)
    slices = {
        (e["tid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    }
    timeline = simulate(ORDERS[name], COSTS)
    assert slices == {(s.rank, str(s.action), s.start, s.end) for s in timeline.spans}
    names = {e["name"]: e["args"] for e in events if e["ph"] == "M" and e["tid"] == 1}
    assert names == {"thread_name": {"name": "rank 1"}, "thread_sort_index": {"sort_index": 1}}
    (process,) = [e for e in events if e["name"] == "process_name"]
    assert process["args"] == {"name": name}


@pytest.mark.parametrize("name", ORDERS)
def test_arrows_lead_from_a_slice_to_the_slice_that_needs_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    chrome_trace(ORDERS[name], path, COSTS)
    events = events_of(path)
    slices = [e for e in events if e["ph"] == "X"]

    def around(end: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            s
            for s in slices
            if s["tid"] == end["tid"] and s["ts"] <= end["ts"] < s["ts"] + s["dur"]
        ]
        return dict(found["args"])

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    timeline = simulate(ORDERS[name], COSTS)
    assert starts.keys() == ends.keys()
    assert len(starts) == len(timeline.transfers) > 0
    assert set(Counter(e["id"] for e in events if "id" in e).values()) == {2}
    for number, start in starts.items():
        sent, used = around(start), around(ends[number])
        assert sent["microbatch"] == used["microbatch"]
        assert sent["kind"] == used["kind"]
        assert used["stage"] - sent["stage"] == (1 if sent["kind"] == "forward" else -1)
        assert ends[number]["bp"] == "e"


def test_counters_are_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    chrome_trace(ORDERS["1f1b"], path, COSTS)
    timeline = simulate(ORDERS["1f1b"], COSTS)
    for rank in range(4):
        counted = [
            (e["ts"] / 1e6, e["args"]["bytes"])
            for e in events_of(path)
            if e["ph"] == "C" and e["name"] == f"memory of rank {rank}"
        ]
        assert counted == [pytest.approx(point) for point in timeline.memory(rank)]


def test_measured_and_simulated_are_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    order = ORDERS["1f1b"]
    chrome_trace(simulate(order, COSTS), path, title="run", simulated=order)
    events = events_of(path)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "run, measured", 1: "run, simulated"}
    assert Counter(e["pid"] for e in events if e["ph"] == "X") == {0: 48, 1: 48}
    assert set(Counter(e["id"] for e in events if "id" in e).values()) == {2}
    assert not [e for e in events if e["ph"] == "C" and e["pid"] == 1]
