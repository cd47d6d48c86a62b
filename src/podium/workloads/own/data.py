"""What users give as samples, as a source: arrays, tensors, Datasets, HDF5 files, Hugging Face's datasets.

Real numbers of 64 bits are delivered as 32, as models have them; nothing else changes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.contract import Split
from podium.data.source import Arrays, Field, Source
from podium.data.sources.arrays import ArraySource
from podium.data.sources.hdf5 import Hdf5Array, Hdf5Source, find_dataset, open_hdf5
from podium.data.sources.subset import subset
from podium.data.text.folder import is_text_folder, open_text
from podium.data.text.token_windows import TokenWindows
from podium.errors import UserError
from podium.machine import counter_rng

_KINDS = (
    "arrays or tensors such as (x, y) or {'x': x, 'y': y}, a Dataset, an HDF5 file with the names of its datasets such "
    "as ('data.h5', 'x', 'y'), a Hugging Face dataset, or a folder of tokens and a length such as ('books', 128)"
)


def as_source(given: Any, *, seed: int, where: str, workers: int = 0, split: Split = "train") -> Source:
    """Return the samples that a user gave as a source; raise UserError with `where` in it if they are none.

    `split`: which of those that a folder of text has.
    """
    if hasattr(given, "gather") and hasattr(given, "fields"):
        source: Source = given
        return source
    if isinstance(given, torch.utils.data.TensorDataset):
        given = given.tensors
    if is_huggingface(given):
        arrays = _columns(given)
        return _arrays(arrays, where) if arrays else _dataset(given.with_format("torch"), seed, workers)
    if isinstance(given, torch.utils.data.Dataset | torch.utils.data.IterableDataset):
        return _dataset(given, seed, workers)
    if hdf5 := hdf5_parts(given):
        return _hdf5(*hdf5)
    if text := _text_parts(given, where):
        folder, length = open_text(text[0]), text[1]
        return TokenWindows(folder.tokens(split), length, folder.vocabulary, str(folder.path / f"{split}.bin"))
    if isinstance(given, Mapping):
        return _arrays(given, where)
    if isinstance(given, tuple | list) and given and all(_is_array(part) for part in given):
        return _arrays(named(given), where)
    if _is_array(given):
        return _arrays({"input": given}, where)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, str | list | tuple):
        return _dataset(given, seed, workers)  # map-style by its methods
    shown = repr(given) if isinstance(given, str | Path | int | float | None) else type(given).__name__
    raise UserError(f"{where} = {shown}: expected {_KINDS}")


def named(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of a sample by name: input (several are numbered) and, last, target."""
    if len(parts) == 1:
        return {"input": parts[0]}
    names = ["input"] if len(parts) == 2 else [f"input{number}" for number in range(len(parts) - 1)]
    return dict(zip([*names, "target"], parts, strict=True))


def held_out(num_samples: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of samples to train on and of those held out: a key chooses, the same every time."""
    words = counter_rng.words(counter_rng.key("held out", seed), np.arange(num_samples), 1)[:, 0]
    order = np.argsort(words)
    num_valid = min(num_samples - 1, max(1, round(share * num_samples)))
    return np.sort(order[num_valid:]), np.sort(order[:num_valid])


def part_of(given: Any, numbers: NDArray[np.int64], *, seed: int, where: str, workers: int = 0) -> Source:
    """Return the samples `numbers` of what a user gave."""
    if is_huggingface(given):
        return as_source(given.select(numbers), seed=seed, where=where, workers=workers)
    return subset(as_source(given, seed=seed, where=where, workers=workers), numbers)


def num_samples(given: Any, *, seed: int, where: str) -> int:
    """Return how many samples there are."""
    if is_huggingface(given) or (
        isinstance(given, torch.utils.data.Dataset) and not isinstance(given, torch.utils.data.IterableDataset)
    ):
        return len(given)
    return len(as_source(given, seed=seed, where=where))


def is_huggingface(given: Any) -> bool:
    """Return whether something is a dataset of Hugging Face's library, which need not be installed."""
    return type(given).__module__.partition(".")[0] == "datasets" and hasattr(given, "column_names")


def hdf5_parts(given: Any) -> tuple[Path, list[str]] | None:
    """Return (path, names of datasets) if an HDF5 file is meant."""
    if not isinstance(given, tuple | list) or not given or not isinstance(given[0], str | Path):
        return None
    path, *names = given
    if len(names) == 1 and isinstance(names[0], tuple | list):
        names = list(names[0])
    return (Path(path), names) if names and all(isinstance(name, str) for name in names) else None


def _text_parts(given: Any, where: str) -> tuple[Path, int] | None:
    """Return (path, tokens read at once) if a folder of text is meant, as `podium data make text` writes."""
    if isinstance(given, str | Path) and is_text_folder(Path(given)):
        raise UserError(
            f"{where} = {str(given)!r}: say how many tokens the model reads at once, as in ({str(given)!r}, 128)"
        )
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], str | Path):
        return None
    path, length = Path(given[0]), given[1]
    return (path, length) if isinstance(length, int) and length > 0 and is_text_folder(path) else None


def as_arrays(given: Any) -> dict[str, NDArray] | None:
    """Return arrays in memory by name, if that is what was given; else None."""
    if isinstance(given, torch.utils.data.TensorDataset):
        given = given.tensors
    if isinstance(given, tuple | list) and given and all(_is_array(part) for part in given):
        given = named(given)
    elif _is_array(given):
        given = {"input": given}
    if isinstance(given, Mapping) and given and all(_is_array(part) for part in given.values()):
        return {str(name): _array(part, str(name)) for name, part in given.items()}
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor) or (hasattr(value, "__array__") and hasattr(value, "shape"))


def _array(value: Any, where: str) -> NDArray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UserError(f"{where} holds values of type {array.dtype}, expected numbers")
    if array.ndim == 0:
        raise UserError(f"{where} is a single number, expected an array with a row for each sample")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _arrays(given: Mapping[str, Any], where: str) -> Source:
    arrays = {str(name): _array(value, f"{where}: {name}") for name, value in given.items()}
    if not arrays:
        raise UserError(f"{where} is empty: expected {_KINDS}")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{where}: the arrays differ in their number of samples: {counts}")
    if not next(iter(lengths.values())):
        raise UserError(f"{where} holds no samples")
    return ArraySource(
        arrays, {name: Field(array.shape[1:], _delivered(array.dtype)) for name, array in arrays.items()}
    )


def _delivered(dtype: np.dtype) -> np.dtype:
    """Return the type that models take: numbers that torch has, and 32 bits where numpy has 64 by default."""
    wider = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32", "complex128": "complex64"}
    return np.dtype(wider.get(dtype.name, dtype.name))


def _dataset(given: Any, seed: int, workers: int) -> Source:
    from podium.data.sources.dataset import DatasetSource

    source: Source = DatasetSource(given, seed=seed, workers=workers)
    return source


def _columns(given: Any) -> dict[str, NDArray]:
    """Return the columns of a Hugging Face dataset as arrays; none where one does not hold equal shapes of numbers."""
    columns = {name: np.asarray(given.with_format("numpy")[:][name]) for name in given.column_names}
    return columns if all(column.dtype.kind in "biuf" for column in columns.values()) else {}


class _Joined:
    """Sources of the same samples, side by side."""

    def __init__(self, parts: Sequence[Source], names: Sequence[str]) -> None:
        self._parts = parts
        fields = {name: field for part in parts for name, field in part.fields.items()}
        self.fields: Mapping[str, Field] = {name: fields[name] for name in names}

    def __len__(self) -> int:
        return len(self._parts[0])

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        for part in self._parts:
            part.gather(samples, {name: out[name] for name in part.fields}, places)


def _hdf5(path: Path, names: Sequence[str]) -> Source:
    """Return datasets of a file: large ones of real numbers stay in it, labels and the like are read into memory."""
    fields = named(names)
    streamed, arrays = {}, {}
    with open_hdf5(path) as file:
        for field, name in fields.items():
            dataset = find_dataset(path, file, name)
            if dataset.dtype in (np.float16, np.float32):
                streamed[field] = Hdf5Array(name, (None,) * (dataset.ndim - 1))
            else:
                arrays[field] = dataset[()]
        lengths = {name: len(find_dataset(path, file, name)) for name in names}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{path}: the arrays differ in their number of samples: {counts}")
    parts: list[Source] = [Hdf5Source(path, streamed)] if streamed else []
    if arrays:
        parts.append(_arrays(arrays, str(path)))
    return _Joined(parts, list(fields))
