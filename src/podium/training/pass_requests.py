"""What a forward and backward pass asks the allocator for, and what it would with more samples.

torch reports every request of its operators, also those inside of them, to its profiler. Passes with two numbers of
samples make the same requests in the same order, some of them larger in proportion to the samples; so each of them is
extended to any number of samples on its own, and the sequence tells how much is in use at its worst moment.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def recorded(passes: Callable[[], None]) -> list[int]:
    """Run `passes`; return its requests in order, as `machine.heap.Requests`. What it keeps, or returns without having
    requested it, is left out."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        passes()
    results = profile.kineto_results
    assert results is not None
    events = sorted(_allocations(results.experimental_event_tree()), key=lambda event: event[0])
    open_at: dict[int, int] = {}
    requests: list[int] = []
    for _, address, num_bytes in events:
        if num_bytes > 0:
            open_at[address] = len(requests)
            requests.append(num_bytes)
        elif address in open_at:
            requests.append(-open_at.pop(address) - 1)
    return requests


def _allocations(nodes: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (time, address, bytes) of what was taken and, with negative bytes, returned."""
    remaining = list(nodes)
    while remaining:
        node = remaining.pop()
        remaining += node.children
        if node.tag.name == "Allocation":
            fields = node.extra_fields
            yield node.start_time_ns, fields.ptr, fields.alloc_size


def extended(few: list[int], num_few: int, more: list[int], num_more: int, num_samples: int) -> list[int] | None:
    """Return the requests for `num_samples` from those for `num_few` and for `num_more`; None where they are not
    alike."""
    if num_few == num_more or len(few) != len(more):
        return None
    factor = (num_samples - num_few) / (num_more - num_few)
    found = []
    for small, large in zip(few, more, strict=True):
        if small < 0 or large < 0:
            if small != large:
                return None
            found.append(small)
        else:
            found.append(max(small, round(small + (large - small) * factor)))
    return found
