"""`podium data make | info | fetch`: create, describe and download data."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from podium.data.download import fetch
from podium.data.formats.idx import read_idx
from podium.data.sources.hdf5 import DAMAGE, open_hdf5, unreadable
from podium.data.sources.hdf5_links import describe_dataset
from podium.data.text.folder import is_text_folder, open_text, text_table
from podium.data.text.make import TextMake, make_text
from podium.data.text.token_windows import open_tokens
from podium.errors import UserError
from podium.machine.bounded_files import open_regular
from podium.recipe.loading import parse_override, read_yaml, validated
from podium.ui.console import err, out, show_table
from podium.ui.table import Table
from podium.workloads.registry import WORKLOADS, workload_class


def make(what: str, options: Iterable[str], *, force: bool = False) -> None:
    """Make text into tokens, or simulate the data of a workload; the schema of each says which options there are.

    Data that already exists in the folder `out` is replaced with `force` only.
    """
    tree = dict(parse_override(option) for option in options)
    if what == "text":
        wanted = validated(TextMake, tree)
        _check_out(wanted.out, force)
        text = make_text(wanted, replace=force)
        show_table(text_table(text))
        out.print(str(text.path), soft_wrap=True)
        return
    makers: dict[str, Any] = {name: cls for name in WORKLOADS if hasattr(cls := workload_class(name), "MakeSection")}
    if what not in makers:
        raise UserError(f"There is no {what!r} data to make: choose one of {', '.join(['text', *makers])}")
    section = validated(makers[what].MakeSection, tree)
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


def info(path: Path) -> None:
    """Show what is in a data file, or in every data file of a folder."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if is_text_folder(path):
        show_table(text_table(open_text(path)))
        return
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    known = [table for table in map(_describe, files) if table is not None]
    if not known:
        raise UserError(
            f"{path} holds no data that Podium reads (HDF5, IDX, meta YAML, text as tokens, indexed tokens)"
        )
    for table in known:
        show_table(table)


def _describe(path: Path) -> Table | None:
    size = f"{path.stat().st_size / 2**20:,.1f} MiB"
    if path.suffix in (".h5", ".hdf5"):
        return Table(f"{path.name} ({size})", ["array", "shape", "type", "layout"], _hdf5_rows(path))
    if "idx" in path.name and "ubyte" in path.name:
        array = read_idx(path)
        row = [path.name, " × ".join(map(str, array.shape)), str(array.dtype), "gzip" if _is_gzip(path) else "plain"]
        return Table(f"{path.name} ({size})", ["array", "shape", "type", "layout"], [row])
    if path.suffix == ".idx":
        found = open_tokens(path)
        assert found.sequences is not None
        assert found.documents is not None
        counts = [len(found.tokens), len(found.sequences) - 1, max(0, len(found.documents) - 1)]
        row = [found.path.name, *(f"{count:,}" for count in counts), str(found.tokens.dtype)]
        return Table(f"{path.name} ({size})", ["file", "tokens", "sequences", "documents", "type"], [row])
    if path.name.startswith("meta.") and path.suffix in (".yaml", ".yml"):
        info = read_yaml(path).get("dataInfo")
        if not isinstance(info, dict):
            raise UserError(f"{path} has no section `dataInfo`")
        rows = [[str(key), _text(value)] for key, value in info.items()]
        return Table(path.name, ["dataInfo", "value"], rows)
    return None


def _text(value: object) -> str:
    """Return a value of a meta file as text: lists in a row, mappings one to a line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ("\n" if any(isinstance(item, dict) for item in value) else ", ").join(map(_text, value))
    return str(value)


def _hdf5_rows(path: Path) -> list[list[str]]:
    rows: list[list[str]] = []

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            rows.append([name, *describe_dataset(item)])

    try:
        with open_hdf5(path) as file:
            file.visititems(visit)
    except DAMAGE as error:
        raise unreadable(path, error) from None
    return rows


def _is_gzip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(2) == b"\x1f\x8b"
