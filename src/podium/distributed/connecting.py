"""How instances find one another at a store, before they have a group. Used by `instances.py`."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count as numbers

import torch
import torch.distributed as dist
from torch import Tensor

from podium.distributed.lost import InstanceLost
from podium.distributed.watched_store import WatchedStore

#: how often an instance that waits for the others to come looks whether they still will
_LOOK_S = 0.2
#: how long instances that are all there may take to connect
_CONNECT_S = 10.0


def connected(
    store: dist.Store, index: int, count: int, timeout_s: float, backend: str, is_over: Callable[[], bool] | None
) -> dist.ProcessGroup:
    """Connect to the others, and return the group. `is_over`: whether it will not come about; given where all others
    are there."""
    timeout = patience = timedelta(seconds=timeout_s)
    if is_over is not None:  # whoever does not connect at once has been lost meanwhile
        store = WatchedStore(store, is_over, timeout_s, _LOOK_S)
        patience = min(timeout, timedelta(seconds=_CONNECT_S))
    try:
        dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=patience)
    except BaseException:
        # torch names groups by their number, which has to be the same for those that come.
        dist.distributed_c10d._world.group_count = 0
        raise
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timeout)  # messages from one instance to another keep the time to connect: `wait_for` has its own
    return group


def gather_through(
    store: dist.Store, index: int, count: int, timeout_s: float, is_over: Callable[[], bool]
) -> Callable[[Tensor], Tensor]:
    """Return a function like `Instances.gather` that needs only a store."""
    calls = numbers()

    def gather(values: Tensor) -> Tensor:
        call = next(calls)
        keys = [f"call-{call}/{place}" for place in range(count)]
        store.set(keys[index], json.dumps(values.tolist()))
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                store.wait(keys, timedelta(seconds=_LOOK_S))
                break
            except dist.DistStoreError:
                if is_over():
                    raise InstanceLost(None, "the group has changed") from None
                if time.monotonic() > deadline:
                    raise
        return torch.tensor([json.loads(store.get(key)) for key in keys], dtype=values.dtype)

    return gather
