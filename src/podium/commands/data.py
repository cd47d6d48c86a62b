"""`podium data make | fetch`: create and download data."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from podium.data.download import fetch
from podium.data.text.folder import text_table
from podium.data.text.make import TextMake, make_text
from podium.errors import UserError
from podium.recipe.loading import validated
from podium.recipe.overrides import parse_override
from podium.ui.console import err, out, show_table
from podium.workloads.registry import WORKLOADS, workload_class


def make(what: str, options: Iterable[str], *, force: bool = False) -> None:
    """Make text into tokens, or simulate the data of a workload; the schema of each says which options there are.

    Data that already exists in the folder `out` is replaced with `force` only.
    """
    if what == "text":
        wanted = validated(TextMake, dict(parse_override(option, TextMake) for option in options))
        _check_out(wanted.out, force)
        text = make_text(wanted, replace=force)
        show_table(text_table(text))
        out.print(str(text.path), soft_wrap=True)
        return
    makers: dict[str, Any] = {name: cls for name in WORKLOADS if hasattr(cls := workload_class(name), "MakeSection")}
    if what not in makers:
        raise UserError(f"There is no {what!r} data to make: choose one of {', '.join(['text', *makers])}")
    schema = makers[what].MakeSection
    section = validated(schema, dict(parse_override(option, schema) for option in options))
    section = section.model_copy(update={"out": section.out.expanduser()})
    _check_out(section.out, force)
    makers[what].make(section)
    out.print(str(section.out), soft_wrap=True)


def _check_out(folder: Path | None, force: bool) -> None:
    """Raise where data would be written over what a user may want to keep; makers replace whole files at a time."""
    if folder is None:
        if force:
            raise UserError("`--force` replaces the data in a folder: say which by `out=FOLDER`")
        return
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose a folder with `out=FOLDER`")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} already exists and is not empty: choose another folder with `out=FOLDER`, or add `--force` to "
            "replace the data in it"
        )


def fetch_with_progress(name: str, folder: Path | None) -> None:
    """Download a data set, with a bar per file in a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
        tasks = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        paths = fetch(name, folder, progress=report)
    for path in paths:
        out.print(str(path), soft_wrap=True)
