"""Who records the calls of a pass (`engine/replay.py`), for those whose work torch's dispatcher does not see: machine
code, and the seeding of blocks."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

# The one place that knows this private name of torch; see docs/architecture.md.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Recorder", "TorchDispatchMode", "note", "recording"]


class Recorder(Protocol):
    """Takes note of calls in the order in which they were made."""

    def note(self, make: Callable[..., Callable[[], object]], arguments: Sequence[Any]) -> None:
        """`make(*arguments)` returns what makes the call again."""
        ...


_recorder: list[tuple[int, Recorder]] = []


def note(make: Callable[..., Callable[[], object]], *arguments: Any) -> None:
    """Tell whoever records this thread how to make a call again; `arguments` may be tensors."""
    if _recorder and _recorder[0][0] == threading.get_ident():
        _recorder[0][1].note(make, arguments)


def recording(recorder: Recorder) -> AbstractContextManager[None]:
    """Return a context in which the calls of this thread are noted."""

    @contextmanager
    def context() -> Any:
        _recorder[:] = [(threading.get_ident(), recorder)]
        try:
            yield
        finally:
            _recorder.clear()

    return context()
