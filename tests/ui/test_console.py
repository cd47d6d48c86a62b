"""The display: plain lines in a file, a live bar in a terminal; numbers a person can read."""

import io
import os
import pty
import re
import select
import subprocess
import time

import pytest
from rich.console import Console

from podium.ui import console
from tests.support.processes import podium_command
from tests.support.recipes import TINY

FACTS = {"epoch": "1.0/2", "train loss": "0.5", "samples/s": "1,234", "left": "0:10"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.6, "0:10"), (59.5, "1:00"), (75, "1:15"), (3725, "1:02:05")],
)
def test_times(seconds, text):
    assert console.clock_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (0.123456, "0.1235"), (1234.5, "1,234"), (1e-5, "1.000e-05"), (2.5e9, "2.500e+09")],
)
def test_numbers(value, text):
    assert console.number(value) == text


LONG = {"epoch": "10.0/20", "train loss": "0.3123", "valid loss": "0.2988", "valid accuracy": "0.9121",
        "samples/s": "7,536", "left": "1:02:05"}  # fmt: skip


@pytest.mark.parametrize("width", [200, 140, 100, 80, 60, 40])
def test_rate_and_time_left_stay_on_the_live_line_and_the_bar_shrinks_first(width):
    terminal = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    display = console.LiveDisplay("training")
    display.update(50, 100, LONG)
    terminal.print(display)
    text = terminal.export_text().rstrip("\n")
    assert len(text) <= width
    assert "\n" not in text
    assert " 50%" in text
    assert text.endswith("samples/s 7,536  left 1:02:05")
    bar, facts = text.count("━"), [name for name in LONG if f"{name} " in text]
    assert facts == [*list(LONG)[: len(facts) - 2], "samples/s", "left"]
    assert bar == 24 or len(text) == width or len(facts) < len(LONG)
    if width >= 140:
        assert len(facts) == len(LONG)
    if width >= 60:
        assert 4 <= bar <= 24


def test_plain_lines_come_at_milestones_and_every_few_seconds(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.PlainDisplay() as display:
        display.update(1, 10, FACTS)
        assert capsys.readouterr().err == ""
        display.update(2, 10, FACTS, milestone=True)
        assert capsys.readouterr().err == "epoch 1.0/2  train loss 0.5  samples/s 1,234  left 0:10\n"
        now[0] += console.PLAIN_EVERY_S
        display.update(3, 10, FACTS)
        assert "epoch 1.0/2" in capsys.readouterr().err


def test_what_looks_like_markup_is_printed_as_it_is(capsys):
    console.say("data[red] in runs/[1]")
    assert capsys.readouterr().err == "data[red] in runs/[1]\n"


def test_progress_is_plain_lines_where_there_is_no_terminal(podium):
    done = podium("train", *TINY["mnist"], "--out", "run")
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in lines] == ["1.0/2", "2.0/2"]
    for line in lines:
        assert re.search(r"train loss \d.*valid loss \d.*samples/s [\d,.]+  left \d+:\d\d", line)
    assert "\x1b" not in done.stderr + done.stdout
    assert done.stdout.splitlines()[-1].startswith("final validation loss: ")


@pytest.mark.slow
def test_progress_is_a_live_bar_in_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    command = podium_command("train", *TINY["mnist"], "--out", "run")
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = read_to_the_end(ours)
        assert process.wait() == 0, shown
    os.close(ours)
    assert "━" in shown
    assert "training" in shown
    assert re.search(r"\d+%", shown)
    assert "\x1b[?25l" in shown  # the cursor is hidden while the bar is drawn
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    assert "final validation loss: " in shown


def read_to_the_end(terminal: int, deadline_s: float = 120) -> str:
    end = time.monotonic() + deadline_s
    parts = []
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            try:
                parts.append(os.read(terminal, 65536))
            except OSError:  # the other side is closed
                break
    return b"".join(parts).decode()
