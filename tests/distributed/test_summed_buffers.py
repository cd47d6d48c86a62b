"""Memory that instances of a host share: nothing stays open where it cannot be opened, and nobody waits for one that
has left."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from podium.distributed.lost import InstanceLost
from podium.distributed.shared_memory import Layout, Segment, SharedMemory


def open_descriptors() -> set[Path]:
    gc.collect()
    return set(Path("/proc/self/fd").iterdir())


def refuse(*args: object) -> None:
    raise OSError("not allowed")


@pytest.mark.parametrize("fails", ["os.pidfd_open", "mmap.mmap", "os.truncate"])
def test_no_descriptor_stays_open_where_a_segment_cannot_be_made(fails, monkeypatch):
    before = open_descriptors()
    monkeypatch.setattr(fails, refuse)
    with pytest.raises(OSError, match="not allowed"):
        Segment.create(2, 1, [(8, torch.float32)])
    monkeypatch.undo()
    assert open_descriptors() == before


def test_no_descriptor_stays_open_where_the_segment_is_another_one():
    layout = Layout(2, 1, [(8, torch.float32)])
    mine = Segment.create(2, 1, layout.sizes)
    before = open_descriptors()
    with pytest.raises(ValueError, match="another process"):
        Segment.opened(os.getpid(), mine.fd, mine.token + 1, layout)
    assert open_descriptors() == before
    seen = Segment.opened(os.getpid(), mine.fd, mine.token, layout)
    seen.flats[0].fill_(3.0)
    assert mine.flats[0].tolist() == [3.0] * 8


def shared_by_two() -> list[SharedMemory]:
    """Two instances' views of the same memory, both of this process."""
    segments = [Segment.create(2, 1, [(8, torch.float32)]) for _ in range(2)]
    return [SharedMemory(segments, own, range(2), timeout_s=60) for own in range(2)]


def test_whoever_waits_for_an_instance_that_leaves_is_told_at_once():
    first, second = shared_by_two()
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(first.barrier)
        second.leave()
        with pytest.raises(InstanceLost, match="it has left the group"):
            waits.result(timeout=10)
    second.barrier()  # the other one had reached it
    with pytest.raises(InstanceLost, match="this one has left the group"):
        second.barrier()
