"""Blocks of samples on their way to an accelerator: copied out of pinned memory by a stream of their own, so that the
host waits for none of it. `feed.py` uses it."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.source import Arrays, Field, host_name


class Upload:
    """The copies of a feed's blocks to one device, and which of its buffers are still being copied."""

    def __init__(self, device: torch.device, fields: Mapping[str, Field]) -> None:
        self._device, self._fields = device, fields
        #: whether the device reads the memory of the host by itself
        self._asynchronous = device.type != "mps"
        self._stream = torch.Stream(device) if self._asynchronous else None
        self._copied: dict[int, torch.Event] = {}

    def buffers(self, num_samples: int) -> dict[str, NDArray]:
        """Return uninitialised arrays as `empty_buffers` does, in memory that the device can read by itself."""
        return {name: self._array((num_samples, *field.shape), field.dtype) for name, field in self._fields.items()}

    def _array(self, shape: tuple[int, ...], dtype: object) -> NDArray:
        like = torch.from_numpy(np.empty(0, dtype))
        array: NDArray = torch.empty(shape, dtype=like.dtype, pin_memory=self._asynchronous).numpy()
        return array

    def rows(self, buffers: Arrays, num_samples: int) -> dict[str, Tensor]:
        """Begin to copy a block, and return it: the current stream waits for the copy, the host does not."""
        given = {name: torch.from_numpy(buffer[:num_samples]) for name, buffer in buffers.items()}
        kept = {host_name(name): given[name] for name, field in self._fields.items() if field.read_on_host}
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in given.items()} | kept
        now = torch.accelerator.current_stream(self._device)
        with self._stream:
            rows = {name: tensor.to(self._device, non_blocking=True) for name, tensor in given.items()}
            copied = torch.Event(self._device)
            copied.record(self._stream)
        now.wait_event(copied)
        for tensor in rows.values():
            tensor.record_stream(now)  # its memory must not be used again while this stream reads it
        self._copied[id(buffers)] = copied
        return rows | kept

    def wait(self, buffers: Arrays) -> None:
        """Return when these buffers may be filled again; called by the thread that fills them."""
        if (copied := self._copied.pop(id(buffers), None)) is not None:
            copied.synchronize()
