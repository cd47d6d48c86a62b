"""Damaged and random files: the decoder gives the library's bits or refuses as it does, and writes nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.jpeg_fuzz import check, damaged


def test_a_few_hundred_damaged_files_decode_as_the_library_decodes_them():
    seen = set()
    for number in range(300):
        rng = np.random.default_rng([1, number])
        seen.add(check(damaged(rng), rng))
    assert {"decoded by it", "left to the library", "refused"} <= seen


@pytest.mark.slow
def test_ten_thousand_damaged_files_decode_as_the_library_decodes_them(tmp_path):
    """In a process of its own, whose machine code checks the bounds of arrays."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.jpeg_fuzz", "--files", "10000", "--seed", "0"]
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env={**os.environ, **checked}, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, f"exit {done.returncode} (negative: killed by that signal)\n{done.stderr[-2000:]}"
    counts = {what: int(count) for what, count in (part.rsplit(" ", 1) for part in done.stdout.strip().split(", "))}
    assert sum(counts.values()) == 10_000
    assert counts["decoded by it"] > 2000
