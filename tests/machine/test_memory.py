"""Memory of the host and of this process."""

import numpy as np
import psutil
import pytest

from podium.machine import memory


def test_the_host_has_what_the_system_says_or_less():
    total, available = memory.host_bytes()
    assert 0 < available <= total <= psutil.virtual_memory().total


def test_the_limit_of_a_control_group_counts_without_what_it_can_give_back(tmp_path):
    for name, text in {
        "memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 400\ninactive_file 300\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    words = ("memory.max", "memory.current", "inactive_file")
    assert memory._limit_of(tmp_path, *words) == [(1000, 400)]
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._limit_of(tmp_path, *words) == []
    assert memory._limit_of(tmp_path / "absent", *words) == []


def test_the_peak_is_that_since_the_reset():
    if not memory.reset_peak():
        pytest.skip("this system does not tell the peak of a process's memory")
    size = 64 << 20
    before = memory.resident_bytes()
    np.ones(size, np.uint8)
    assert memory.peak_bytes() - before > size // 2
    memory.reset_peak()
    assert memory.peak_bytes() - before < size // 2
