"""A store whose waiting ends once nobody needs the result any more. Process groups of torch meet through it."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from podium.distributed.lost import InstanceLost


class WatchedStore(dist.Store):
    """Another store, which raises InstanceLost while it waits for a key once `is_over()`."""

    def __init__(self, store: dist.Store, is_over: Callable[[], bool], timeout_s: float, look_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._store, self._is_over, self._look_s = store, is_over, look_s

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values."""
        left = self._timeout_s if timeout is None else timeout.total_seconds()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=min(left, self._look_s)))
                return
            except dist.DistStoreError:
                if self._is_over():
                    raise InstanceLost(None, "the group has changed") from None
                left -= self._look_s
                if left <= 0:
                    raise
