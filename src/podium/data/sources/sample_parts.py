"""The parts of a sample that a user's code makes: tensors, arrays and numbers, in mappings, tuples and dataclasses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import UserError

#: kinds of numpy types: booleans, integers, real and complex numbers
NUMBERS = "biufc"
#: what models take: types that torch computes with, and 32 bits where numpy has 64 by default
_DELIVERED = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
    "float64": "float32",
    "complex128": "complex64",
}
#: keys, positions or attributes that lead to a part
Path = tuple[Any, ...]


class Parts:
    """Where the parts of samples are found, learnt from one of them.

    The parts of a pair are `input` and `target`, of longer tuples `input0`, `input1`, … and `target`, unless `names`
    are given; those of a mapping have its keys, and nested ones are joined by a dot. A list of numbers is an array.
    """

    def __init__(self, sample: Any, owner: str, names: Sequence[str] | None = None) -> None:
        self._owner = owner
        self._names = None if names is None else tuple(names)
        self._containers: list[tuple[Path, int]] = []
        self.paths: dict[str, Path] = dict(self._find(sample, (), ()))

    def of(self, sample: Any, number: int) -> Iterator[tuple[str, NDArray]]:
        """Yield (name, array) of every part of a sample; raise UserError unless it has the same parts."""
        for path, count in self._containers:
            try:
                container = part_at(sample, path)
                found = len(container) if hasattr(container, "__len__") else len(fields(container))
            except (KeyError, IndexError, TypeError, AttributeError):
                found = -1
            if found != count:
                where = f"{'.'.join(map(str, path))} of it" if path else "it"
                raise UserError(
                    f"sample {number} of {self._owner} has other parts than sample 0: {where} should have {count}; "
                    "every sample must have the same"
                )
        for name, path in self.paths.items():
            try:
                value = part_at(sample, path)
            except (KeyError, IndexError, TypeError, AttributeError):
                raise UserError(f"sample {number} of {self._owner} has no {name}, but sample 0 has") from None
            yield name, self._array(value, name, number)

    def _find(self, value: Any, path: Path, shown: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        """Yield (name, path) of every part of a sample, or of a part of it: `shown` is the name of that."""
        keys: Sequence[Any]
        if is_dataclass(value) and not isinstance(value, type):
            keys = names = tuple(of.name for of in fields(value))
        elif isinstance(value, Mapping):
            keys, names = tuple(value), tuple(map(str, value))
        elif isinstance(value, tuple) or (isinstance(value, list) and not is_numbers(value)):
            keys = range(len(value))
            names = getattr(value, "_fields", None) or (tuple(map(str, keys)) if path else self._part_names(len(value)))
        else:
            yield ".".join(shown) if path else self._part_names(1)[0], path
            return
        if not keys:
            raise UserError(f"{'.'.join(shown) or 'sample 0'} of {self._owner} is empty: expected tensors or numbers")
        self._containers.append((path, len(keys)))
        for key, name in zip(keys, names, strict=True):
            yield from self._find(part_at(value, (key,)), (*path, key), (*shown, name))

    def _part_names(self, count: int) -> tuple[str, ...]:
        if self._names is None:
            inputs = ("input",) if count <= 2 else tuple(f"input{number}" for number in range(count - 1))
            return inputs if count == 1 else (*inputs, "target")
        if len(self._names) != count:
            raise UserError(f"names has {len(self._names)} names, but a sample of {self._owner} has {count} parts")
        return self._names

    def _array(self, value: Any, name: str, number: int) -> NDArray:
        if isinstance(value, Tensor):
            # numpy has no bfloat16; every value of it is one of float32
            array: NDArray = (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
            return array
        if isinstance(value, np.ndarray | np.generic | int | float | list):
            array = np.asarray(value)
            if array.dtype.kind in NUMBERS:
                return array
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise UserError(
            f"{name} of sample {number} of {self._owner} is {kind}: expected tensors, arrays or numbers; leave it out "
            "or turn it into numbers"
        )


def part_at(value: Any, path: Path) -> Any:
    """Return what a path leads to."""
    for key in path:
        value = value[key] if hasattr(value, "__getitem__") else getattr(value, key)
    return value


def is_numbers(value: list[Any]) -> bool:
    """Return whether a list, or its lists, hold plain numbers only: then it is an array, not a list of parts."""
    return bool(value) and all(
        isinstance(item, bool | int | float) or (isinstance(item, list) and is_numbers(item)) for item in value
    )


def first_row(batch: Any) -> Any:
    """Return what a collate function made of one sample, without the axis of the samples."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {of.name: first_row(getattr(batch, of.name)) for of in fields(batch)}
    if isinstance(batch, Mapping):
        return {key: first_row(value) for key, value in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and not is_numbers(batch)):
        return tuple(first_row(value) for value in batch)
    return batch[0]


def delivered(dtype: np.dtype) -> np.dtype:
    """Return the type in which numbers of this type are delivered."""
    return np.dtype(_DELIVERED.get(dtype.name, dtype.name))
