"""What is seen of a run from its folder alone: how far, how fast, who waits for whom, whether it still runs."""

import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from podium.monitor.screen import Screen
from podium.monitor.tails import RecordTail, log_tail
from podium.monitor.view import Watcher
from podium.runs.folder import Run, write_json
from podium.runs.live import instance_file


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def said(index: int, count: int = 2, number: int = 1, waits: float = 0.0, **more: object) -> dict:
    """What an instance writes, with ten seconds of which it waited for others some part."""
    phases = {"train": 10 * (1 - waits), "communication": 10 * waits, "input_wait": 0.0}
    return {
        "instance": index, "instances": count, "host": f"host-{index}", "pid": 10 + index, "every_s": 2.0,
        "number": number, "ended": False, "phase": "train", "update": 40, "total_updates": 100, "global_batch": 64,
        "local_batch": 32, "window": {"seconds": 10.0, "updates": 20, "phases": phases},
        "values": {"process_cpu_percent": 90.0, "process_memory_bytes": 5e8},
        "unknown": {"power_w": "no counters"}, **more,
    }  # fmt: skip


def run_of(folder: Path, *states: dict, host: str = "elsewhere", state: str = "running") -> Run:
    run = Run(folder)
    write_json(run.environment_file, {"host": host})
    write_json(run.summary_file, {"state": state, "updates": 10, "total_updates": 100})
    run.monitor.mkdir(exist_ok=True)
    for one in states:
        instance_file(run, one["instance"]).write_text(json.dumps(one))
    return run


def test_rates_and_who_waits_for_whom(tmp_path):
    run = run_of(tmp_path, said(0, 4, waits=0.4), said(1, 4, waits=0.02), said(2, 4, waits=0.35), said(3, 4, waits=0.4))
    view = Watcher(run).look()
    assert (view.state, view.update, view.total_updates) == ("running", 40, 100)
    assert view.samples_per_second == pytest.approx(128)
    assert view.left_s == pytest.approx(60 * 64 / 128)
    assert view.rows[0].rate == pytest.approx(20 * 32 / 6)  # its own samples, while it did not wait
    assert view.waiting.startswith("the others wait for instance 1 (on host-1): 40% of the time in instance 0")


@pytest.mark.parametrize(
    ("waits", "sentence"),
    [
        ((0.30, 0.05), "instance 0 waits for instance 1 (on host-1)"),
        ((0.10, 0.12), "no instance holds the others up: each waits 10% to 12%"),
    ],
)
def test_two_instances(waits, sentence, tmp_path):
    run = run_of(tmp_path, *(said(index, waits=share) for index, share in enumerate(waits)))
    assert sentence in Watcher(run).look().waiting


def test_an_instance_that_waits_for_its_input_is_named(tmp_path):
    hungry = said(1)
    hungry["window"]["phases"] = {"train": 5.0, "input_wait": 5.0}
    assert "instance 1 waits for its input 50% of the time" in Watcher(run_of(tmp_path, said(0), hungry)).look().waiting


def test_a_silent_instance_is_named_and_when_all_are_silent_the_run_may_be_dead(tmp_path):
    """Seen from another host, where the lock says nothing. Clocks of hosts may differ: only changes count."""
    clock, run = Clock(), run_of(tmp_path, said(0), said(1))
    watcher = Watcher(run, clock)
    assert watcher.look().state == "running"
    for number in (2, 3, 4):
        clock.now += 4
        run_of(tmp_path, said(0, number=number))
        view = watcher.look()
    assert view.state == "running"
    assert "silent for 12 s: instance 1 (on host-1); all others wait for it" in view.waiting
    assert [row.doing for row in view.rows] == ["train", "silent"]
    clock.now += 20
    view = watcher.look()
    assert view.state == "silent"
    assert "no instance has written for 20 s" in view.sentence
    run_of(tmp_path, said(0, number=5), said(1, number=2))
    assert watcher.look().state == "running"


def test_on_the_host_of_the_run_its_lock_tells_that_it_was_killed(tmp_path):
    clock, run = Clock(), run_of(tmp_path, said(0, 1), host=socket.gethostname())
    watcher = Watcher(run, clock)
    assert watcher.look().state == "killed"  # nobody holds it
    with run.locked():
        clock.now += 5
        assert watcher.look().state == "running"
    clock.now += 5
    assert "podium resume" in watcher.look().sentence


def test_a_run_that_has_ended_says_how(tmp_path):
    view = Watcher(run_of(tmp_path, said(0, 1, ended=True), state="interrupted")).look()
    assert (view.state, view.waiting, view.left_s) == ("interrupted", "", None)
    assert view.rows[0].doing == "ended"


def test_records_are_followed_as_they_grow_and_when_the_file_is_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = '{{"update": {0}, "train/loss": {0}.5}}\n'.format
    tail = RecordTail(path)
    tail.read()
    path.write_text(line(1) + line(2) + line(3)[:10])
    tail.read()
    assert tail.curves["train/loss"] == [(1, 1.5), (2, 2.5)]
    with path.open("a") as file:
        file.write(line(3)[10:] + "garbage\n" + line(4))
    tail.read()
    assert [x for x, _ in tail.curves["train/loss"]] == [1, 2, 3, 4]
    (tmp_path / "new").write_text(line(1))
    (tmp_path / "new").rename(path)
    tail.read()
    assert tail.curves["train/loss"] == [(1, 1.5)]


def test_long_curves_are_thinned(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"update": {k}, "train/loss": {k}.0}}\n' for k in range(20_000)))
    tail = RecordTail(path)
    tail.read()
    points = tail.curves["train/loss"]
    assert 1000 < len(points) <= 3000
    assert points[0] == (0, 0)
    assert points[-1][0] > 19_900


def test_a_log_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\nfirst\n\x1b[2Jsecond\n\n\xff third\n")
    assert log_tail(path, 3) == ["first", "\\x1b[2Jsecond", "\ufffd third"]
    assert log_tail(tmp_path / "nowhere", 3) == []


@pytest.mark.parametrize("height", [5, 10, 24, 60])
@pytest.mark.parametrize("width", [20, 44, 80, 132])
def test_the_screen_fits_any_terminal(width, height, tmp_path):
    states = [said(index, 9, waits=index / 20) for index in range(9)]
    states[0]["values"] |= {"cpu_percent": 90.0, "memory_bytes": 1e9, "disk_read_bytes_per_s": 1e6}
    run = run_of(tmp_path, *states)
    run.metrics_file.write_text(
        "".join(f'{{"update": {k}, "train/loss": {1 / k}, "train/\\u001b[2J": {k}}}\n' for k in range(1, 40))
    )
    run.log.mkdir()
    run.instance_log(0).write_text("a long line of the log\n" * 30)
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    console.print(Screen(Watcher(run).look(), height, "q: end"), end="")
    lines = file.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "\x1b[2J" not in file.getvalue()
    assert run.path.name[:10] in lines[0]
    if (width, height) == (80, 24):
        shown = "\n".join(lines)
        for what in ("update 40 of 100", "the others wait for instance 0", "memory 1 GB", "unknown: power: no", "log"):
            assert what in shown
        assert any("\u2801" <= char <= "\u28ff" for char in shown)
