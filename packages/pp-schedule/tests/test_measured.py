import pytest

from pp_schedule import Action, StageCosts, measured_costs, simulate
from pp_schedule.measured import measured_timeline, split_steps
from pp_schedule.orders import breadth_first_order, one_f_one_b_order

ORDERS = {
    "1f1b": one_f_one_b_order(4, 6),
    "v": breadth_first_order({0: [0, 3], 1: [1, 2]}, 3),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_simulated_run_measured_is_the_simulated_run(name: str) -> None:
    costs = StageCosts([1.0, 1.5, 0.5, 2.0], 1.25, 1.25)
    timeline = simulate(ORDERS[name], costs)
    rows = [
        [(s.action, 100.0 + s.start, 100.0 + s.end) for s in timeline.spans if s.rank == rank]
        for rank in ORDERS[name]
    ]
    measured = measured_timeline(rows)
    assert sorted(measured.spans) == sorted(timeline.spans)
    assert measured.makespan == timeline.makespan
    assert measured.bubbles == pytest.approx(timeline.bubbles)
    assert {t[:4] for t in measured.transfers} == {t[:4] for t in timeline.transfers}
    found = measured_costs(measured)
    assert list(found.forward) == [1.0, 1.5, 0.5, 2.0]
    assert list(found.backward_input) == list(found.backward_weight) == [1.25] * 4
    assert simulate(ORDERS[name], found).makespan == timeline.makespan


def test_costs_of_split_backwards() -> None:
    order = {rank: [Action(rank, kind, m) for kind in "FIW" for m in range(3)] for rank in range(2)}
    timeline = simulate(order, StageCosts(1.0, 2.0, 4.0))
    found = measured_costs(timeline)
    assert list(found.backward_input) == [0.0, 2.0]
    assert list(found.backward_weight) == [6.0, 4.0]
    assert simulate(order, found).spans == timeline.spans


def test_costs_of_an_evaluation() -> None:
    found = measured_costs(simulate({0: [Action(0, "F", 0)], 1: [Action(1, "F", 0)]}))
    assert list(found.forward) == [1.0, 1.0]
    assert list(found.backward_input) == list(found.backward_weight) == [0.0, 0.0]


def test_steps_end_where_an_action_comes_again() -> None:
    one = [(Action(0, "F", m), 0.0, 1.0) for m in range(2)]
    both = [*one, (Action(0, "B", 0), 0.0, 1.0)]
    assert split_steps([*one, *both, *both]) == [one, both, both]
    assert split_steps([]) == []


def test_a_message_never_ends_before_it_begins() -> None:
    rows = [[(Action(0, "F", 0), 0.0, 1.0)], [(Action(1, "F", 0), 0.9, 2.0)]]
    (transfer,) = measured_timeline(rows).transfers
    assert transfer == (0, 1, Action(0, "F", 0), 1.0, 1.0)
