"""What is raised where another instance does not answer."""

from collections.abc import Iterator
from contextlib import contextmanager


class InstanceLost(RuntimeError):
    """Another instance did not answer: it died, hangs, or lost one that it waits for itself."""

    def __init__(self, instance: int | None, reason: str) -> None:
        super().__init__(f"{'another instance' if instance is None else f'instance {instance}'} is lost: {reason}")
        self.instance = instance


@contextmanager
def naming_who_is_lost(instance: int | None) -> Iterator[None]:
    """Around messages to or from `instance` (None: any of them): gloo's errors become InstanceLost."""
    try:
        yield
    except InstanceLost:
        raise
    except RuntimeError as error:  # gloo's; a timeout of the store is one too
        raise InstanceLost(instance, str(error)) from error
