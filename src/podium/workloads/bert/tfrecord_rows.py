"""Rows as written by the published preparation of BERT's data: TFRecord files with one `Example` for each row.

    input_ids, input_mask, segment_ids                            (T) integers
    masked_lm_positions, masked_lm_ids, masked_lm_weights         (M) unused slots have weight 0
    next_sentence_labels                                          (1) 1 where the second part is a random one

Masks are fixed in the files, so they are the same in every epoch. The last twentieth of the rows is for valid and test.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from podium.contract import Split
from podium.data.formats.tfrecord import OpenFiles, RecordFile, Values, parse_example
from podium.data.source import Arrays, Field
from podium.errors import UserError
from podium.workloads.bert.text_rows import UNUSED, Layout

_MAX_OPEN = 64
_ROW = ("input_ids", "input_mask", "segment_ids")
_SLOTS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
_LABEL = "next_sentence_labels"
_HELD_OUT = 20  # one in this many rows


class RecordRows:
    """The rows of a split from the TFRecord files in a folder, in the order of the files' names."""

    def __init__(
        self, folder: Path, layout: Layout, vocabulary: int, split: Split, max_rows: int | None = None
    ) -> None:
        assert layout.max_sequences == 1
        self.layout, self._vocabulary = layout, vocabulary
        self.fields: Mapping[str, Field] = layout.fields
        if not folder.is_dir():
            raise UserError(f"workload.data.path = {folder}: expected a folder that exists")
        paths = sorted(path for path in folder.iterdir() if path.suffix in (".tfrecord", ".tfrecords"))
        if not paths:
            raise UserError(f"{folder} has no files that end in .tfrecord or .tfrecords")
        opened = OpenFiles(_MAX_OPEN)
        self._files = [RecordFile(path, opened) for path in paths]
        self._begins = np.concatenate([[0], np.cumsum([len(file) for file in self._files])])
        total = int(self._begins[-1])
        held_out = max(1, total // _HELD_OUT)
        rows = range(total - held_out) if split == "train" else range(total - held_out, total)
        self._rows = rows[:max_rows]

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, samples: NDArray[np.int64], out: Arrays, places: NDArray[np.int64] | None = None) -> None:
        samples = samples + self._rows.start
        files = np.searchsorted(self._begins, samples, side="right") - 1
        for row, (sample, file) in enumerate(zip(samples.tolist(), files.tolist(), strict=True)):
            self._read(self._files[file], sample - int(self._begins[file]), row, out)
        out["position"][...] = np.arange(self.layout.length)
        out["first"][...] = 0

    def _read(self, file: RecordFile, number: int, row: int, out: Arrays) -> None:
        try:
            example = parse_example(file.read(number))
            tokens, mask, segment = (_values(example, name, self.layout.length) for name in _ROW)
            masked, target, weight = (_values(example, name, self.layout.num_slots) for name in _SLOTS)
            (label,) = _values(example, _LABEL, 1)
        except ValueError as error:
            raise UserError(f"{file.path}, record {number} (counted from 0): {error}") from None
        used = weight > 0
        largest = int(max(tokens.max(), target[used].max(initial=0)))
        if largest >= self._vocabulary:
            raise UserError(
                f"{file.path}, record {number} (counted from 0): token {largest:,} is outside the vocabulary of "
                f"{self._vocabulary:,}; set workload.model.vocabulary"
            )
        if min(tokens.min(), masked.min(), target.min()) < 0 or masked.max() >= len(tokens) or label not in (0, 1):
            raise UserError(f"{file.path}, record {number} (counted from 0): its numbers are not valid")
        out["tokens"][row], out["segment"][row], out["sequence"][row] = tokens, segment, mask
        out["masked"][row] = np.where(used, masked, 0)
        out["target"][row] = np.where(used, target, UNUSED)
        out["follows"][row] = label


def _values(example: dict[str, Values], name: str, length: int) -> NDArray:
    if name not in example:
        raise ValueError(f"it has no {name}, so it is not a row of BERT's pretraining")
    # Faster than an array of the whole: to numpy, a protobuf container is a sequence of unknown types.
    values = np.fromiter(example[name], np.float64 if name == _SLOTS[-1] else np.int64)
    if len(values) != length:
        key = "length" if name in _ROW else "masked_slots"
        raise ValueError(f"{name} has {len(values)} numbers, expected {length} (workload.data.{key})")
    return values
