"""`podium data info`: what is in the files that trainings read."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from podium.data.formats import cifar
from podium.data.formats.idx import read_idx
from podium.data.formats.tfrecord import RecordFile, Values, parse_example
from podium.data.images.stores import Split, open_folders, split_folder
from podium.data.sources.hdf5 import DAMAGE, open_hdf5, unreadable
from podium.data.sources.hdf5_links import describe_dataset
from podium.data.text.folder import is_text_folder, open_text, text_table
from podium.data.text.token_windows import TokenFile, largest_token, open_tokens
from podium.errors import UserError
from podium.machine.bounded_files import open_regular
from podium.recipe.loading import read_yaml
from podium.ui.console import show_table
from podium.ui.table import Table

_KNOWN = (
    "HDF5, IDX, meta YAML, CIFAR's binary files, TFRecord, folders of pictures, text as tokens, flat and indexed tokens"
)
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)")
_TOKEN_FILES = ("train.bin", "valid.bin", "val.bin", "test.bin")
#: tokens that are looked at to find out whether they have two bytes or four
_LOOKED_AT = 1 << 16


def info(path: Path) -> None:
    """Show what is in a data file, or in every data file of a folder."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    tables = list(_of_folder(path) if path.is_dir() else filter(None, [_of_file(path, alone=True)]))
    if not tables:
        raise UserError(f"{path} holds no data that Podium reads ({_KNOWN})")
    for table in tables:
        show_table(table)


def _of_folder(folder: Path) -> Iterator[Table]:
    if is_text_folder(folder):
        yield text_table(open_text(folder))
        return
    kind = cifar.kind_in(folder)
    if kind and cifar.kind_of_file(cifar.place_of(folder, kind) / cifar.file_names(kind)[0]):
        yield _cifar_table(cifar.place_of(folder, kind), kind)
        return
    if split_folder(folder, "train") is not None and any(p.is_dir() for p in (folder / "train").iterdir()):
        yield _picture_table(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    shards = [path for path in files if _is_tfrecord(path)]
    if shards:
        yield _tfrecord_table(folder, shards)
    for path in files:
        if path not in shards and (table := _of_file(path, alone=False)) is not None:
            yield table


def _of_file(path: Path, *, alone: bool) -> Table | None:
    """Describe one file; `alone`: it was asked for by its name, so a `.bin` need not be called train or the like."""
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
    if _is_tfrecord(path):
        return _tfrecord_table(path.parent, [path])
    if path.suffix == ".bin":
        return _bin_table(path, size, alone=alone)
    if path.name.startswith("meta.") and path.suffix in (".yaml", ".yml"):
        about = read_yaml(path).get("dataInfo")
        if not isinstance(about, dict):
            raise UserError(f"{path} has no section `dataInfo`")
        return Table(path.name, ["dataInfo", "value"], [[str(key), _text(value)] for key, value in about.items()])
    return None


# --- images -----------------------------------------------------------------------------------------------------------


def _cifar_table(folder: Path, kind: cifar.Kind) -> Table:
    rows = []
    for name in cifar.file_names(kind):
        if (folder / name).is_file():
            _, labels = cifar.load_file(folder / name, kind)
            counts = np.bincount(labels)
            rows.append([name, f"{len(labels):,}", str(np.count_nonzero(counts)), f"{cifar.SIZE} × {cifar.SIZE} × 3"])
        else:
            rows.append([name, "missing", "", ""])
    return Table(f"{folder.name}: {kind}", ["file", "images", "classes", "shape"], rows)


def _picture_table(folder: Path) -> Table:
    rows: list[list[str]] = []
    names: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        place = split_folder(folder, split)
        if place is None:
            continue
        store, names = open_folders(folder, split, None)
        counts = Counter(store.parse(number, b"").label for number in range(len(store)))
        spread = f"{min(counts.values()):,} … {max(counts.values()):,}"
        rows.append([place.name, f"{len(store):,}", f"{len(counts):,}", spread, _first_picture(store.name(0))])
    columns = ["folder", "pictures", "classes", "in a class", "the first is"]
    shown = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
    return Table(f"{folder.name}: pictures by class", columns, rows, f"Classes: {shown}")


def _first_picture(name: str) -> str:
    try:
        with Image.open(name) as picture:  # reads the header only
            return f"{picture.format} {picture.width} × {picture.height}"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "not readable"


# --- records ----------------------------------------------------------------------------------------------------------


def _is_tfrecord(path: Path) -> bool:
    return path.suffix in (".tfrecord", ".tfrecords") or _SHARD.fullmatch(path.name) is not None


def _tfrecord_table(folder: Path, paths: list[Path]) -> Table:
    """Count files and records by what files are called, and tell what the first record holds."""
    groups: dict[str, list[Path]] = {}
    for path in paths:
        match = _SHARD.fullmatch(path.name)
        groups.setdefault(f"{match[1]}-…-of-{match[2]}" if match else path.name, []).append(path)
    rows = []
    for name, files in groups.items():
        records = [RecordFile(path) for path in files]
        first = next((file for file in records if len(file)), None)
        held = "" if first is None else _features(first)
        rows.append([name, f"{len(files):,}", f"{sum(map(len, records)):,}", held])
    return Table(f"{folder.name}: TFRecord", ["files", "number", "records", "the first holds"], rows)


def _features(file: RecordFile) -> str:
    try:
        features = parse_example(file.read(0))
    except ValueError:
        return "something else than an Example"
    return "\n".join(f"{name}: {_values(values)}" for name, values in sorted(features.items()))


def _values(values: Values) -> str:
    first = next(iter(values), None)
    if isinstance(first, bytes):
        return f"{len(first):,} bytes" if len(values) == 1 else f"{len(values):,} texts"
    kind = "number" if isinstance(first, float) else "integer"
    return f"{len(values):,} {kind}{'s' if len(values) != 1 else ''}"


# --- tokens -----------------------------------------------------------------------------------------------------------


def _bin_table(path: Path, size: str, *, alone: bool) -> Table | None:
    """Describe a file of CIFAR's, or of tokens; those with an index are described by that."""
    if alone and (kind := cifar.kind_of_file(path)):
        _, labels = cifar.load_file(path, kind)
        row = [path.name, f"{len(labels):,}", str(len(np.unique(labels))), f"{cifar.SIZE} × {cifar.SIZE} × 3"]
        return Table(f"{path.name}: {kind}", ["file", "images", "classes", "shape"], [row])
    if path.with_suffix(".idx").is_file():
        return _of_file(path.with_suffix(".idx"), alone=alone) if alone else None
    if not alone and path.name not in _TOKEN_FILES:
        return None
    found = _flat_tokens(path)
    row = [path.name, f"{len(found.tokens):,}", f"{largest_token(found):,}", found.tokens.dtype.name]
    meta = path.parent / "meta.json"
    caption = f"{meta.name}: {_meta_text(meta)}" if meta.is_file() else ""
    return Table(f"{path.name} ({size}): tokens", ["file", "tokens", "largest", "type"], [row], caption)


def _flat_tokens(path: Path) -> TokenFile:
    """Open a flat file as the type that its first numbers suggest: with four bytes each, every second half is zero."""
    size = path.stat().st_size
    if size % 4 == 0 and size >= 16:
        halves = np.fromfile(path, "<u2", count=_LOOKED_AT)
        if not halves[1::2].any() and halves.any():
            return open_tokens(path, "uint32")
    return open_tokens(path, "uint16")


def _meta_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            tree = json.loads(file.read(1 << 26))
    except (OSError, ValueError, RecursionError):
        return "not readable"
    if not isinstance(tree, dict):
        return "not a mapping"
    return ", ".join(f"{key} {value}" for key, value in tree.items() if isinstance(value, int | str))


# --- arrays and meta files --------------------------------------------------------------------------------------------


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
