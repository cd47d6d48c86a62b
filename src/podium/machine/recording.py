"""Who records the calls of a pass (`engine/replay.py`), for those whose work torch's dispatcher does not see: machine
code, and the seeding of blocks."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode", "Recorder", "TorchDispatchMode", "note", "recording"]


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


#: who records, and the thread that it records
_recording: list[tuple[int, Recorder]] = []


def note(make: Callable[..., Callable[[], object]], *arguments: Any) -> None:
    """Tell whoever records this thread how to make a call again; `arguments` may be tensors."""
    if _recording and _recording[0][0] == threading.get_ident():
        _recording[0][1].note(make, arguments)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Have the calls of this thread noted."""
    _recording[:] = [(threading.get_ident(), recorder)]
    try:
        yield
    finally:
        _recording.clear()
