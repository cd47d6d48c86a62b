"""Windows of tokens for language models. Files are mapped into memory: nothing is read before it is used.

Sample i of a source is the window of `length + 1` tokens that begins at token i · stride: the model reads the first
`length` and predicts the last `length`. With stride = length, the default, windows share one token, and every token but
the first is predicted once.

    flat        <name>.bin, one token after the other
    indexed     <name>.bin beside <name>.idx, as Megatron writes them. The index: 9 bytes "MMIDIDX", then uint64
                version 1, uint8 type of the tokens, uint64 sequences, uint64 documents + 1, int32 length of each
                sequence, int64 place of each in bytes, int64 first sequence of each document
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from podium.data.source import Arrays, Field
from podium.errors import UserError, system_reason

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
#: token types by their number in an index; _REAL: types that cannot be tokens
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_REAL = {6: "64-bit floating-point numbers", 7: "32-bit floating-point numbers"}
#: tokens looked at together, and the most bytes and tokens that a `meta.json` may have
_PART, _MAX_META, _MAX_VOCABULARY = 1 << 24, 1 << 26, 1 << 31


class TokenWindows:
    """Windows of consecutive tokens as a source, delivered as int32 under the name `tokens`."""

    def __init__(self, tokens: NDArray, length: int, vocabulary: int, where: str, stride: int | None = None) -> None:
        """`where` names the tokens in messages."""
        if len(tokens) <= length:
            shorter = f", or set `workload.data.length` to {len(tokens) - 1:,} or less" if len(tokens) > 1 else ""
            raise UserError(
                f"{where} has {len(tokens):,} tokens, too few for one window of {length + 1:,} (the context and one "
                f"more): provide more text{shorter}"
            )
        self.fields: Mapping[str, Field] = {"tokens": Field((length + 1,), np.int32)}
        self._windows = sliding_window_view(tokens, length + 1)
        self._stride, self._vocabulary, self._where = stride or length, vocabulary, where
        self._num_samples = (len(tokens) - length - 1) // self._stride + 1

    def __len__(self) -> int:
        return self._num_samples

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        rows = self._windows[samples * self._stride]
        # Checked here, since files may be larger than memory; an unknown token would be read from beyond the embedding.
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        if low < 0 or high >= self._vocabulary:
            raise UserError(
                f"{self._where} holds the token {low if low < 0 else high}, but `workload.model.vocabulary` is "
                f"{self._vocabulary:,}"
            )
        out["tokens"][...] = rows


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a file, mapped into memory; with an index, also where sequences and documents begin."""

    path: Path
    tokens: NDArray
    #: int64, in tokens, with the end; None: there is no index
    sequences: NDArray[np.int64] | None = None
    #: int64, in sequences, with the end
    documents: NDArray[np.int64] | None = None


def open_tokens(path: Path, dtype: str = "uint16") -> TokenFile:
    """Open a file of tokens by its name, with or without `.bin`; `dtype` is the type of flat files."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    data, index = stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")
    if path.is_file() and path.suffix not in (".bin", ".idx"):
        data = path
    if not data.is_file():
        raise UserError(f"There is no file of tokens {data}")
    if index.is_file():
        return _open_indexed(data, index)
    return TokenFile(data, _mapped(data, np.dtype(dtype).newbyteorder("<")))


def largest_token(file: TokenFile) -> int:
    """Return the largest token, read a part at a time: the file may be larger than memory; -1 of no tokens."""
    parts = (file.tokens[first : first + _PART] for first in range(0, len(file.tokens), _PART))
    return max((int(part.max()) for part in parts), default=-1)


def described_vocabulary(meta: Path) -> int | None:
    """Return `vocab_size` of a `meta.json` beside files of tokens; None if there is no such file."""
    try:
        with meta.open("rb") as file:
            text = file.read(_MAX_META + 1)
        found = json.loads(text)["vocab_size"] if len(text) <= _MAX_META else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{meta} cannot be read: {system_reason(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= _MAX_VOCABULARY:
        raise UserError(f"{meta} does not say how many tokens there are: expected a number `vocab_size` in it")
    return found


def _mapped(path: Path, dtype: np.dtype) -> NDArray:
    try:
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise UserError(f"{path} has {size:,} bytes, which is not a whole number of {dtype.name} tokens")
        return np.asarray(np.memmap(path, dtype, "r")) if size else np.zeros(0, dtype)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from error


def _open_indexed(data: Path, index: Path) -> TokenFile:
    try:
        raw = np.asarray(np.memmap(index, np.uint8, "r")) if index.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError(f"{index} cannot be read: {system_reason(error)}") from error
    if raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise UserError(f"{index} is not an index of tokens: it does not begin with MMIDIDX")
    if len(raw) < _HEADER.size:
        raise UserError(f"{index} is truncated: it ends inside its header")
    _, version, code, num_sequences, num_starts = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if version != 1:
        raise UserError(f"{index} has version {version}, but only version 1 can be read")
    if code in _REAL:
        raise UserError(f"{index} says that {data.name} holds {_REAL[code]}, which cannot be tokens")
    if code not in _TYPES:
        raise UserError(f"{index} gives its tokens the unknown type {code} (known: 1 to 5 and 8)")
    expected = _HEADER.size + num_sequences * (4 + 8) + num_starts * 8
    if len(raw) < expected:  # more may follow: how samples are to be mixed
        raise UserError(
            f"{index} is truncated: {num_sequences:,} sequences take {expected:,} bytes, but it has {len(raw):,}"
        )
    dtype = np.dtype(_TYPES[code])
    place = _HEADER.size + 4 * num_sequences
    lengths = raw[_HEADER.size : place].view("<i4")
    begins = raw[place : place + 8 * num_sequences].view("<i8")
    documents = raw[place + 8 * num_sequences : expected].view("<i8").astype(np.int64)
    sequences = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(begins, sequences[:-1] * dtype.itemsize):
        raise UserError(f"{index} is damaged: its sequences do not follow one another")
    tokens = _mapped(data, dtype)
    if len(tokens) != sequences[-1]:
        raise UserError(f"{data} holds {len(tokens):,} tokens, but {index.name} says {sequences[-1]:,}")
    if len(documents) and (documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any()):
        raise UserError(f"{index} is damaged: its documents do not cover its sequences")
    return TokenFile(data, tokens, sequences, documents)
