"""The clock: phases are exclusive and add up to the total."""

import pytest

from podium.training import clock as clock_module
from podium.training.clock import Clock


@pytest.fixture
def now(monkeypatch):
    state = {"s": 100.0}
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: state["s"])
    return state


def test_nested_phases_are_counted_once_and_add_up(now):
    clock = Clock()
    now["s"] += 1
    with clock.phase("train"):
        now["s"] += 5
        with clock.phase("valid"):
            now["s"] += 2
        now["s"] += 1
        clock.move("input_wait", 0.5)
    seconds = clock.seconds()
    assert seconds["startup"] == 1
    assert seconds["train"] == 5.5
    assert seconds["valid"] == 2
    assert seconds["input_wait"] == 0.5
    assert sum(value for name, value in seconds.items() if name != "total") == seconds["total"] == 9


def test_a_restored_clock_goes_on_counting(now):
    first = Clock()
    with first.phase("train"):
        now["s"] += 3
    second = Clock()
    second.restore(first.seconds())
    with second.phase("train"):
        now["s"] += 4
    seconds = second.seconds()
    assert seconds["train"] == seconds["total"] == 7
