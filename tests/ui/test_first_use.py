import threading

import pytest

from podium.ui import console
from podium.ui.first_use import told_at_first


@pytest.fixture
def told(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(console, "say", said.append)
    return said


def test_a_long_first_call_is_told_once_while_it_lasts(told):
    begun, calls = threading.Event(), []

    def compiled(number: int) -> int:
        calls.append(number)
        if len(calls) == 1:
            begun.set()
            while not told:  # as long as it takes until it is told
                threading.Event().wait(0.001)
        return 2 * number

    function, results = told_at_first("compiling", compiled, after_s=0.01), []
    first = threading.Thread(target=lambda: results.append(function(1)))
    first.start()
    begun.wait()
    others = [threading.Thread(target=lambda: results.append(function(2))) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join()
    assert told == ["compiling"]
    assert results == [2, 4, 4, 4]
    assert function(3) == 6


def test_what_is_ready_at_once_is_not_told(told):
    assert told_at_first("compiling", abs, after_s=60)(-3) == 3
    assert told == []
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread.is_alive()
                and not thread.finished.is_set()]  # fmt: skip


def test_an_error_of_the_first_call_is_its_callers(told):
    function = told_at_first("compiling", int, after_s=60)
    with pytest.raises(ValueError, match="invalid"):
        function("x")
    assert function("3") == 3
