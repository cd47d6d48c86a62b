"""The error raised when another instance does not respond."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: errors of this instance's own memory or device, which say more than that another instance is lost
_OWN = (torch.OutOfMemoryError, torch.AcceleratorError)
_OWN_TEXTS = re.compile(
    r"out of memory|can't allocate memory|unhandled (cuda|hip|sycl) error|device-side assert|(CUDA|HIP|XPU) error"
    r"|No backend type associated|does not support|not implemented",
    re.IGNORECASE,
)


class InstanceLost(RuntimeError):
    """Another instance did not respond: it died, hangs, or has itself lost an instance that it waits for."""

    def __init__(self, instance: int | None, reason: str) -> None:
        super().__init__(f"{'another instance' if instance is None else f'instance {instance}'} is lost: {reason}")
        self.instance = instance


@contextmanager
def naming_lost_instance(instance: int | None) -> Iterator[None]:
    """Turn the errors of groups into InstanceLost, around messages to or from `instance` (None: any of them); those of
    this instance's own memory and device stay what they are."""
    try:
        yield
    except InstanceLost:
        raise
    except RuntimeError as error:  # of gloo and other backends, and timeouts of the store
        if isinstance(error, _OWN) or _OWN_TEXTS.search(str(error)):
            raise
        raise InstanceLost(instance, str(error)) from error
