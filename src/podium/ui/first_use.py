"""What takes seconds the first time on a machine, and is then kept on disk: told while a person waits for it."""

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from podium.ui import console

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: what is ready sooner, as it was kept, is not worth a line
AFTER_S = 1.0


def told_at_first(sentence: str, function: Callable[_P, _R], after_s: float = AFTER_S) -> Callable[_P, _R]:
    """Return `function`, whose first call says `sentence` if it takes long; calls of other threads wait for it."""
    lock, ready = threading.Lock(), threading.Event()

    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if ready.is_set():
            return function(*args, **kwargs)
        with lock:
            if ready.is_set():
                return function(*args, **kwargs)
            timer = threading.Timer(after_s, console.say, [sentence])
            timer.daemon = True
            timer.start()
            try:
                return function(*args, **kwargs)
            finally:
                timer.cancel()
                ready.set()

    return called
