"""An instance looks for its launcher before it loads anything, and does not outlive it."""

import os
import signal
import subprocess
import sys

#: an instance as far as its first line, and then for good
WAITING = """
import os, signal, sys
from podium.launch.lifeline import end_with_launcher
end_with_launcher(os.environ)
heavy = [name for name in ("torch", "numpy", "psutil", "pydantic", "typer") if name in sys.modules]
print("watched", *heavy, flush=True)
signal.pause()
"""
#: a launcher that starts one and is killed
LAUNCHER = """
import os, signal, subprocess, sys
env = {**os.environ, "PODIUM_LAUNCHER": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env)
signal.pause()
"""


def test_an_instance_whose_launcher_has_gone_loads_nothing():
    env = {**os.environ, "PODIUM_LAUNCHER": "1"}
    done = subprocess.run([sys.executable, "-m", "podium", "--version"], env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_a_launcher_that_is_killed_takes_its_instances_along_from_their_first_line():
    command = [sys.executable, "-c", LAUNCHER, WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"watched\n"
        launcher.send_signal(signal.SIGKILL)
        # The instance has the other end of the pipe: it is closed when that has ended, too.
        assert launcher.stdout.read() == b""
