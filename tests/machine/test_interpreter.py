import gc
import subprocess
import sys

import pytest

from podium.machine.interpreter import loading

_QUICK = """
import atexit, sys, threading, time
from podium.machine.interpreter import QuickEnd

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
end = QuickEnd()
atexit.register(print, "registered since")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
sys.stdout.write("unfinished line ")
"""


def _ended(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", _QUICK + code], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_quick_end_joins_threads_and_flushes_but_takes_nothing_apart(code):
    assert _ended(f"end.code = {code}; sys.exit({code})") == (code, "unfinished line thread\nregistered since\n")


def test_without_a_code_python_ends_as_usual():
    assert _ended("raise SystemExit(3)") == (3, "unfinished line thread\nregistered since\ntaken apart\n")


def test_no_garbage_is_looked_for_while_libraries_are_loaded():
    frozen = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
