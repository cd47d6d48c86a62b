"""Files of arrays that people have: .npz, .npy, .h5, .csv; and outputs written as .npz. Nothing read is executed."""

import csv
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from podium.errors import UserError, system_reason
from podium.machine.atomic_files import write_files

KINDS = (".npz", ".npy", ".h5", ".hdf5", ".csv")
#: more than this is not one file of samples to predict from: convert it to HDF5 data of the workload
_MAX_BYTES = 64 << 30


def read_arrays(path: Path) -> dict[str, NDArray]:
    """Return the arrays of a file by name; a file of one array without a name gives it the name `""`."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UserError(f"{path}: expected a file ending in {', '.join(KINDS)}, or a folder of the workload's data")
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
        if kind in (".npz", ".npy"):
            return _numpy(path)
        return _csv(path) if kind == ".csv" else _hdf5(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from None


def _numpy(path: Path) -> dict[str, NDArray]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"": found}
        with found:
            return {name: found[name] for name in found.files}
    except (ValueError, EOFError, KeyError, MemoryError) as error:
        raise UserError(f"{path} has no plain arrays in numpy's format: {error}") from None


def _hdf5(path: Path) -> dict[str, NDArray]:
    with h5py.File(path, "r") as file:
        names = [name for name, item in file.items() if isinstance(item, h5py.Dataset)]
        for name in names:
            if isinstance(file.get(name, getlink=True), h5py.ExternalLink) or file[name].external:
                raise UserError(f"{path}: {name} lies in another file, which is not followed")
        if sum(file[name].size * file[name].dtype.itemsize for name in names) > _MAX_BYTES:
            raise UserError(f"{path} is larger than {_MAX_BYTES >> 30} GiB: predict from parts of it")
        return {name: file[name][()] for name in names}


def _csv(path: Path) -> dict[str, NDArray]:
    """Read numbers, with or without a line of names; the columns are one array."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        first = next(csv.reader(file), [])
    try:
        skip = 0 if _are_numbers(first) else 1
        return {"": np.loadtxt(path, delimiter=",", skiprows=skip, ndmin=2, dtype=np.float64)}
    except ValueError as error:
        raise UserError(f"{path}: expected numbers separated by commas: {str(error).split(';')[0]}") from None


def _are_numbers(words: list[str]) -> bool:
    try:
        return bool([float(word) for word in words])
    except ValueError:
        return False


def write_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write a new .npz file, whole or not at all."""
    if path.suffix.lower() != ".npz":
        raise UserError(f"{path}: outputs are written as .npz")
    if path.exists():
        raise UserError(f"{path} already exists: choose another name")
    try:
        with write_files(path) as (temporary,), temporary.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path} cannot be written: {system_reason(error)}") from None
