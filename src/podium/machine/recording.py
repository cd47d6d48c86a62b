"""Who records the calls of a pass (`engine/replay.py`), for those whose work torch's dispatcher does not see: machine
code, and the seeding of blocks."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode", "Recorder", "TorchDispatchMode", "is_own_pass", "note", "recording"]


class OperatorMode(TorchDispatchMode):
    """A mode that sees every operator, without torch's compiler, whose import takes longer than the first updates."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Protocol):
    """Takes note of calls in the order in which they were made."""

    def note(self, make: Callable[..., Callable[[], object]], arguments: Sequence[Any]) -> None:
        """`make(*arguments)` returns what makes the call again."""
        ...


#: who records, if anyone does, and the thread whose pass it is
_recording: list[tuple[int, Recorder | None]] = []


def note(make: Callable[..., Callable[[], object]], *arguments: Any) -> None:
    """Tell whoever records this thread how to make a call again; `arguments` may be tensors."""
    if is_own_pass() and (recorder := _recording[0][1]) is not None:
        recorder.note(make, arguments)


def is_own_pass() -> bool:
    """Return whether this thread runs a pass whose operators are recorded, or whose gradients are looked at: hooks on
    gradients leave both alone, and do their work afterwards."""
    return bool(_recording) and _recording[0][0] == threading.get_ident()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Have the calls of this thread noted, if there is a recorder, and its gradients left alone."""
    _recording[:] = [(threading.get_ident(), recorder)]
    try:
        yield
    finally:
        _recording.clear()
