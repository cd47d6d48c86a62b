"""The list of commands, shown without the parts of rich that take as long to load as all the rest of it."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer import Context
from typer.core import TyperGroup

#: what typer imports of rich to show help and errors in ways that are not used here
_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


class LightGroup(TyperGroup):
    """A group of commands whose help is there sooner, and looks the same."""

    def format_help(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        with _unused_left_out():
            import typer.rich_utils  # noqa: F401
        super().format_help(ctx, formatter)


@contextmanager
def _unused_left_out() -> Iterator[None]:
    """Let empty classes stand for the unused ones while typer imports them; whoever imports them later gets the real
    ones."""
    absent = {name: only for name, only in _UNUSED.items() if name not in sys.modules}
    for name, only in absent.items():
        module: Any = types.ModuleType(name)
        setattr(module, only, type(only, (), {}))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
