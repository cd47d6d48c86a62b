"""A table, wherever it is shown. Loads nothing heavy, so that commands that only list something start at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table for the console and the report; cells are text, ready to show."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""
