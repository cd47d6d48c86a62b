"""Progress in a notebook: one line that is redrawn in place, in HTML; milestones stay above it."""

import html
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

#: seconds between two redraws, each of which is a message to the browser
_EVERY_S = 0.5
_MAX_MILESTONES = 12


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookDisplay:
    """A bar with its facts, and below it the facts of the last milestones (validations)."""

    def __init__(self, what: str) -> None:
        self._what, self._last, self._milestones = what, 0.0, list[str]()
        self._handle: Any = None

    def update(self, done: int, total: int, facts: Mapping[str, str], *, milestone: bool = False) -> None:
        if milestone:
            self._milestones = [*self._milestones, _text(facts)][-_MAX_MILESTONES:]
        now = time.monotonic()
        if milestone or now - self._last >= _EVERY_S or done == total:
            self._last = now
            self._show(done / max(1, total), facts)

    def _show(self, share: float, facts: Mapping[str, str]) -> None:
        from IPython.display import HTML, display

        bar = f'<progress value="{share:.4f}" max="1" style="width: 12em; vertical-align: middle"></progress>'
        lines = "".join(f"<div>{line}</div>" for line in self._milestones)
        head = f"<div>{html.escape(self._what)} {bar} {100 * share:.0f} % &nbsp; {_text(facts)}</div>"
        page = HTML(f'<div style="font-family: monospace; font-size: 90%">{head}{lines}</div>')
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


def _text(facts: Mapping[str, str]) -> str:
    return " &nbsp; ".join(f"{html.escape(name)} {html.escape(value)}" for name, value in facts.items())
