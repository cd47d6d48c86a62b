"""Instances rotate over the cores, so that each of them gets its share of the slowest.

Instances wait for one another at every update, so the slowest core of the moment sets the pace of all. Cores of virtual
machines are rarely equal: what a neighbour does takes a few percent of one or of another, and that changes within
minutes. With rotation, whatever slows one core slows all instances alike (bench/results/instances.md). Only threads are
moved: weights do not depend on it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: Rotations between two looks at the helper threads.
_LOOK_EVERY = 10


class CoreRotation:
    """Moves the training threads of a host's instances; helper threads (feed, saving) keep to one core each.

    Helpers are started by training threads, wherever these are, and brought back to the core that their instance had
    first: every core then carries the helpers of one instance.
    """

    def __init__(self, node_of: Mapping[int, int]) -> None:
        """Take `node_of`, the NUMA node of every core; threads stay on theirs."""
        self._node_of = node_of
        self._homes: dict[int, int] = {}
        self._num_rotations = 0

    def rotate(self, process_ids: Sequence[int]) -> bool:
        """Give the core of each process to the next one; return whether it did.

        Nothing is done while a process has several cores, or one that another has too: it is still starting, has more
        than one thread, or there are fewer cores than instances.
        """
        try:
            bound = [os.sched_getaffinity(process_id) for process_id in process_ids]
        except (OSError, AttributeError):  # one has ended; or this is not Linux
            return False
        cores = [core for allowed in bound for core in allowed]
        if not len(bound) == len(cores) == len(set(cores)):
            return False
        if set(process_ids) != set(self._homes):  # the first rotation, also after a restart
            self._homes, self._num_rotations = dict(zip(process_ids, cores, strict=True)), 0
        moves = next_cores(cores, self._node_of)
        if moves == cores:
            return False
        for process_id, core in zip(process_ids, moves, strict=True):
            _move(process_id, core)  # moves the thread with the number of the process: the one that trains
        if self._num_rotations % _LOOK_EVERY == 0:
            self._bring_home()
        self._num_rotations += 1
        return True

    def _bring_home(self) -> None:
        for process_id, home in self._homes.items():
            for thread in _helpers(process_id):
                with suppress(OSError):
                    allowed = os.sched_getaffinity(thread)
                    if len(allowed) == 1 and allowed != {home}:  # threads from before the binding may run anywhere
                        _move(thread, home)


def next_cores(cores: Sequence[int], node_of: Mapping[int, int]) -> list[int]:
    """Return for each of `cores` the next one on its NUMA node; after the last comes the first."""
    nodes: dict[int | None, list[int]] = {}
    for core in sorted(cores):
        nodes.setdefault(node_of.get(core), []).append(core)
    after = {core: node[place - len(node) + 1] for node in nodes.values() for place, core in enumerate(node)}
    return [after[core] for core in cores]


def _helpers(process_id: int) -> Iterator[int]:
    """Yield all threads of a process but the first; none once it has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{process_id}/task").iterdir():
            if int(entry.name) != process_id:
                yield int(entry.name)


def _move(thread: int, core: int) -> None:
    with suppress(OSError):  # it has ended, or the core was taken away: no reason to end a run
        os.sched_setaffinity(thread, {core})
