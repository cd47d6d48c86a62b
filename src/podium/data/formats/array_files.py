"""Files of arrays that people have: .npz, .npy, .h5, .csv; and outputs written as .npz. Nothing read is executed, no
other file is read in their place, and none may take more memory than there is."""

import csv
import io
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from podium.data.formats.npy import DAMAGE as NPY_DAMAGE
from podium.data.formats.npy import read_npy
from podium.data.sources.hdf5 import DAMAGE as HDF5_DAMAGE
from podium.data.sources.hdf5 import available_bytes, open_hdf5
from podium.data.sources.hdf5_links import check_own_numbers, follow_links
from podium.errors import UserError, system_reason
from podium.machine.atomic_files import write_files
from podium.machine.bounded_files import open_regular

KINDS = (".npz", ".npy", ".h5", ".hdf5", ".csv")
#: numbers of these kinds are taken: truth values, whole and floating-point ones
_NUMBERS = "biuf"
_MAX_ARRAYS, _MAX_LINE = 10_000, 1 << 20
#: a number in text takes two bytes or more, and eight in memory
_TEXT_GROWS = 5


def read_arrays(path: Path) -> dict[str, NDArray]:
    """Return the arrays of a file by name; a file of one array without a name gives it the name `""`."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UserError(f"{path}: expected a file ending in {', '.join(KINDS)}, or a folder of the workload's data")
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if kind == ".npz":
                return _npz(path, file)
            if kind == ".csv":
                _check_memory(path, num_bytes * _TEXT_GROWS)
                return _csv(path, file)
        if kind == ".npy":
            _check_memory(path, num_bytes)
            return {"": _npy(path)}
        return _hdf5(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


def _check_memory(path: Path, num_bytes: int) -> None:
    if num_bytes > available_bytes():
        raise UserError(
            f"{path} needs about {num_bytes / 1e9:,.1f} GB of memory, more than there is: predict parts of it"
        )


def _npy(path: Path) -> NDArray:
    try:
        return read_npy(path)
    except ValueError as error:
        raise UserError(f"{path} has no plain arrays in numpy's format: {error}") from None


def _npz(path: Path, file: io.BufferedReader) -> dict[str, NDArray]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if one.filename.endswith(".npy")]
            if len(members) > _MAX_ARRAYS:
                raise UserError(f"{path} has more than {_MAX_ARRAYS:,} arrays")
            _check_memory(path, sum(one.file_size for one in members))  # no more is ever unpacked
            arrays = {}
            for one in members:
                with archive.open(one) as member:
                    arrays[one.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
            return arrays
    except (zipfile.BadZipFile, zlib.error, RuntimeError, *NPY_DAMAGE):
        raise UserError(f"{path} has no plain arrays in numpy's format: it is damaged, or holds other things") from None


def _hdf5(path: Path) -> dict[str, NDArray]:
    with open_hdf5(path) as file:
        try:
            datasets: dict[str, h5py.Dataset] = {}
            for name in file:
                found = follow_links(path, file, name)
                if found is None or found.shape is None or found.dtype.kind not in _NUMBERS:
                    continue
                if len(datasets) >= _MAX_ARRAYS:
                    raise UserError(f"{path} has more than {_MAX_ARRAYS:,} arrays")
                check_own_numbers(path, file, found)
                datasets[name] = found
            _check_memory(path, sum(math.prod(one.shape) * one.dtype.itemsize for one in datasets.values()))
            return {name: one[()] for name, one in datasets.items()}
        except (MemoryError, *HDF5_DAMAGE):
            raise UserError(f"{path} cannot be read as HDF5: it is damaged") from None


def _csv(path: Path, file: io.BufferedReader) -> dict[str, NDArray]:
    """Read numbers, with or without a line of names; the columns are one array."""
    first = file.readline(_MAX_LINE + 1)
    if len(first) > _MAX_LINE:
        raise UserError(f"{path}: its first line has more than {_MAX_LINE:,} bytes: expected a row of numbers")
    if not _are_numbers(first):
        file.seek(len(first))
        first = file.readline(_MAX_LINE)
    if not first.strip():
        raise UserError(f"{path} holds no rows of numbers")
    file.seek(file.tell() - len(first))
    try:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
        array = np.loadtxt(text, delimiter=",", ndmin=2, dtype=np.float64)
    except (ValueError, MemoryError) as error:
        reason = str(error).split(";")[0].strip().removesuffix(".")
        raise UserError(f"{path}: expected numbers separated by commas: {reason}") from None
    return {"": array}


def _are_numbers(line: bytes) -> bool:
    try:
        words = next(csv.reader([line.decode("utf-8", errors="replace")]), [])
        return bool([float(word) for word in words])
    except (ValueError, csv.Error):
        return False


def check_new_arrays(path: Path) -> None:
    """Raise UserError unless this names a new .npz file."""
    if path.suffix.lower() != ".npz":
        raise UserError(f"{path}: outputs are written as .npz")
    if path.exists():
        raise UserError(f"{path} already exists: choose another name")


def write_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write a new .npz file, whole or not at all."""
    check_new_arrays(path)
    try:
        with write_files(path) as (temporary,), temporary.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from None
