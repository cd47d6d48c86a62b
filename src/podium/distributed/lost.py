"""The error raised when another instance does not respond."""

from collections.abc import Iterator
from contextlib import contextmanager


class InstanceLost(RuntimeError):
    """Another instance did not respond: it died, hangs, or has itself lost an instance that it waits for."""

    def __init__(self, instance: int | None, reason: str) -> None:
        super().__init__(f"{'another instance' if instance is None else f'instance {instance}'} is lost: {reason}")
        self.instance = instance


@contextmanager
def naming_lost_instance(instance: int | None) -> Iterator[None]:
    """Turn gloo's errors into InstanceLost, around messages to or from `instance` (None: any of them)."""
    try:
        yield
    except InstanceLost:
        raise
    except RuntimeError as error:  # gloo's errors, and timeouts of the store
        raise InstanceLost(instance, str(error)) from error
