"""Cores by turns: who gets which, on real processes where this machine has the cores for it."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.launch.core_rotation import CoreRotation, next_cores
from tests.support.processes import until

NEEDS_TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
#: a process with a second thread, which waits for its input to end
TWO_THREADS = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print('ready', flush=True)"


@given(cores=st.lists(st.integers(0, 200), unique=True, max_size=16), per_node=st.integers(1, 64))
def test_cores_stay_distinct_and_on_their_node_and_come_round(cores, per_node):
    node_of = {core: core // per_node for core in range(200)}  # core 200 is on no known one
    now, seen = cores, []
    for _ in cores:
        seen.append(now)
        now = next_cores(now, node_of)
        assert sorted(now) == sorted(cores)
        assert [node_of.get(core) for core in now] == [node_of.get(core) for core in cores]
    for index, core in enumerate(cores):  # everybody has had every core of its node
        node = {other for other in cores if node_of.get(other) == node_of.get(core)}
        assert {turn[index] for turn in seen} == node


@pytest.fixture
def processes():
    """Two of them, each bound to a core of its own."""
    command = [sys.executable, "-c", TWO_THREADS]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second,
    ):
        for process, core in zip((first, second), two_cores(), strict=True):
            assert process.stdout.readline() == b"ready\n"
            bind(process, {core})
        yield first, second
        for process in (first, second):
            process.kill()


def two_cores():
    return sorted(os.sched_getaffinity(0))[:2]


def threads_of(process):
    """That of the process itself comes first."""
    return sorted(int(entry.name) for entry in Path(f"/proc/{process.pid}/task").iterdir())


def bind(process, cores):
    for thread in threads_of(process):
        os.sched_setaffinity(thread, cores)


def cores_of(process):
    return [os.sched_getaffinity(thread) for thread in threads_of(process)]


def numbers(processes):
    return [process.pid for process in processes]


@NEEDS_TWO
def test_training_threads_change_and_those_beside_them_stay(processes):
    first, second = two_cores()
    turns = CoreRotation({})
    for ours, theirs in (second, first), (first, second), (second, first):
        assert turns.rotate(numbers(processes))
        assert [cores_of(process) for process in processes] == [[{ours}, {first}], [{theirs}, {second}]]


@NEEDS_TWO
def test_a_thread_started_elsewhere_is_brought_home(processes):
    first, second = two_cores()
    turns = CoreRotation({})
    assert turns.rotate(numbers(processes))
    _, helper = threads_of(processes[0])
    os.sched_setaffinity(helper, {second})  # as a thread has it that the training has started after this turn
    assert all(turns.rotate(numbers(processes)) for _ in range(11))
    assert os.sched_getaffinity(helper) == {first}
    os.sched_setaffinity(helper, {first, second})  # nobody has bound it
    assert all(turns.rotate(numbers(processes)) for _ in range(11))
    assert os.sched_getaffinity(helper) == {first, second}


@NEEDS_TWO
@pytest.mark.parametrize("what", ["nobody bound", "one bound", "same core", "two nodes", "one has ended", "one alone"])
def test_nothing_moves_where_turns_make_no_sense(what, processes):
    first, second = two_cores()
    wanted = {"nobody bound": [{first, second}] * 2, "one bound": [{first, second}, {second}],
              "same core": [{first}] * 2}.get(what, [{first}, {second}])  # fmt: skip
    for process, cores in zip(processes, wanted, strict=True):
        bind(process, cores)
    left = processes[:1] if what in ("one has ended", "one alone") else processes
    if what == "one has ended":
        processes[1].kill()
        processes[1].wait()
    turns = CoreRotation({first: 0, second: 1} if what == "two nodes" else {})
    assert not turns.rotate(numbers(left if what == "one alone" else processes))
    assert [cores_of(process) for process in left] == [[cores] * 2 for cores in wanted[: len(left)]]


@NEEDS_TWO
@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "no such core"), PermissionError(), ProcessLookupError()])
def test_a_core_that_was_taken_away_ends_nothing(error, processes, monkeypatch):
    def refuse(thread, cores):
        raise error

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    CoreRotation({}).rotate(numbers(processes))
    first, second = two_cores()
    assert [cores_of(process) for process in processes] == [[{first}] * 2, [{second}] * 2]


@NEEDS_TWO
def test_processes_may_end_at_any_moment(processes):
    turns, changed, stop = CoreRotation({}), [], threading.Event()

    def go_on():
        while not stop.is_set():
            changed.append(turns.rotate(numbers(processes)))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        until(lambda: changed.count(True) > 20, "turns")
        for process in processes:
            process.kill()
            process.wait()
        ended = len(changed) + 1
        until(lambda: len(changed) > ended + 20, "calls after the end")
    finally:
        stop.set()
        thread.join()
    assert not any(changed[ended:])
