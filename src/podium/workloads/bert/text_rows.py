"""Rows of tokens for BERT's pretraining, made from text on demand. Nothing is prepared on disk.

A sequence is `[CLS] A [SEP] B [SEP]`: consecutive sentences of a document, divided at a random sentence into two parts;
in half of the sequences B comes from another document instead. Where one long sentence fills a row, a B that should
follow is taken from the next place with two sentences: otherwise nearly all pairs of short rows would be random ones.
A row has one sequence, or is packed with several. 15 % of the tokens are to be predicted: of these 80 % are replaced by
`[MASK]`, 10 % by a random token, 10 % stay.

Everything is drawn from (seed, number of the sample), training masks from the sample's position in the training: they
differ in every epoch. A whole micro-batch is made at once, without a loop over its rows.

Rows of arrays are rows of the micro-batch (B); T tokens in a row, at most S sequences in it, M slots for tokens to
predict. Delivered, by name:

    tokens, segment, position, sequence   (T)   sequence is 0 at padding, else 1, 2 …; positions restart in each
    masked, target                        (M)   positions in the row, and the true tokens; -1 in unused slots
    first, follows                        (S)   positions of [CLS]; 0 if B follows A, 1 if not, -1: no sequence
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from podium.contract import Split
from podium.data.source import Arrays, Field
from podium.machine import counter_rng
from podium.workloads.bert.corpus import Corpus

Ints = NDArray[np.int64]
Uniforms = NDArray[np.float64]

#: for the published lengths; other rows have slots for 15 %
_SLOTS = {128: 20, 512: 76}
_NUM_SPECIAL = 3  # [CLS] and two [SEP] in a sequence
_MASK, _RANDOM = 0.8, 0.1
#: packed rows: another sequence is started if there is room for this many tokens
_LEAST_ROOM = 16
_PAIR_DRAWS, _SLOT_DRAWS = 6, 2
UNUSED = -1


@dataclass(frozen=True)
class Layout:
    """The sizes of a row."""

    length: int
    max_sequences: int = 1
    mask_share: float = 0.15
    #: for a row with one sequence; None: as published
    slots: int | None = None

    @property
    def num_slots(self) -> int:
        """Return the slots of a row: a few more if packed, as each sequence rounds its number of masked tokens."""
        own = self.slots or _SLOTS.get(self.length, math.ceil(self.mask_share * self.length))
        return own + self.max_sequences - 1

    @property
    def fields(self) -> dict[str, Field]:
        row, slots, sequences = (self.length,), (self.num_slots,), (self.max_sequences,)
        return {
            "tokens": Field(row, np.int32),
            "segment": Field(row, np.uint8),
            "position": Field(row, np.int32),
            "sequence": Field(row, np.uint8),
            "masked": Field(slots, np.int32),
            "target": Field(slots, np.int64, read_on_host=True),
            "first": Field(sequences, np.int32),
            "follows": Field(sequences, np.int64, read_on_host=True),
        }


@dataclass(frozen=True)
class _Pairs:
    """One sequence for every row: the offsets of its parts in the tokens, and their lengths."""

    begin_a: Ints
    length_a: Ints
    begin_b: Ints
    length_b: Ints
    follows: Ints

    @property
    def length(self) -> Ints:
        return self.length_a + self.length_b + _NUM_SPECIAL


class TextRows:
    """A source of rows made from text: `num_rows` of them (None: as many as the text fills), limited to `max_rows`.

    Any number of consecutive samples is spread evenly over the text.
    """

    def __init__(
        self,
        corpus: Corpus,
        layout: Layout,
        split: Split,
        *,
        seed: int = 0,
        short_share: float = 0.1,
        redraw: Literal["masks", "pairs", "none"] = "masks",
        num_rows: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.corpus, self.layout = corpus, layout
        self.fields: Mapping[str, Field] = layout.fields
        self._num_rows = num_rows or max(1, len(corpus.tokens) // (layout.length - _NUM_SPECIAL))
        self._length = min(self._num_rows, max_rows or self._num_rows)
        self._seed, self._split, self._redraw = seed, split, redraw
        self._short_share = short_share
        special = corpus.special
        self._cls, self._sep, self._mask = special["[CLS]"], special["[SEP]"], special["[MASK]"]

    def __len__(self) -> int:
        return self._length

    def gather(self, samples: Ints, out: Arrays, places: Ints | None = None) -> None:
        pairs_index, masks_index = samples, samples
        pairs_by = masks_by = "sample"
        if places is not None and self._redraw != "none":
            masks_index, masks_by = places, "place"
            if self._redraw == "pairs":
                pairs_index, pairs_by = places, "place"
        lengths = self._fill(samples, pairs_index, pairs_by, out)
        self._hide(masks_index, self._stream("masks", masks_by), lengths, out)

    def _stream(self, what: str, by: str, sequence: int = 0) -> int:
        return counter_rng.key("bert", what, by, self._seed, self._split, sequence)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def _fill(self, samples: Ints, index: Ints, by: str, out: Arrays) -> Ints:
        """Write the rows before anything is masked; return the lengths of their sequences, (B, S)."""
        layout = self.layout
        num, length, most = len(samples), layout.length, layout.max_sequences
        for name in ("tokens", "segment", "position", "sequence", "first"):
            out[name][...] = 0
        out["tokens"][...] = self.corpus.special["[PAD]"]
        out["follows"][...] = UNUSED
        used = np.zeros(num, np.int64)
        lengths = np.zeros((num, most), np.int64)
        for number in range(most):
            room = length - used
            rows = np.flatnonzero(room >= _LEAST_ROOM) if number else np.arange(num)
            if not len(rows):
                break
            uniform = counter_rng.uniforms(self._stream("pairs", by, number), index[rows], _PAIR_DRAWS)
            # The first sequences of rows cover the text evenly; those that fill rows up come from anywhere.
            at = (_spread(samples) + uniform[:, 0] / self._num_rows) % 1.0 if number == 0 else uniform[:, 0]
            pairs = self._pairs(at, room[rows] - _NUM_SPECIAL, uniform)
            self._write(rows, used[rows], number, pairs, out)
            lengths[rows, number] = pairs.length
            used[rows] += pairs.length
        return lengths

    def _pairs(self, at: Uniforms, most: Ints, uniform: Uniforms) -> _Pairs:
        """Choose sequences of at most `most` tokens without the special ones, from about `at` (0 … 1) in the text."""
        corpus = self.corpus
        sentences, documents, num_tokens = corpus.sentences, corpus.document_tokens, len(corpus.tokens)
        full = self.layout.length - _NUM_SPECIAL
        short = 2 + (uniform[:, 2] * (full - 1)).astype(np.int64)
        size = np.minimum(np.where(uniform[:, 1] < self._short_share, short, full), most)

        # A window of `size` tokens around the position, shifted to lie within its document.
        token = (at * num_tokens).astype(np.int64)
        document = _last_before(documents, token)
        low, high = documents[document], documents[document + 1]
        begin = np.clip(token - size // 2, low, np.maximum(low, high - size))
        sentence = _last_before(sentences, begin)
        begin = sentences[sentence]
        end = np.minimum(begin + size, high)

        num_sentences = np.searchsorted(sentences, end) - sentence
        divide = sentences[sentence + 1 + (uniform[:, 3] * np.maximum(num_sentences - 1, 0)).astype(np.int64)]
        divisible = (divide > begin) & (divide < end)
        divide = np.where(divisible, divide, end)
        other = uniform[:, 4] < 0.5
        # A keeps the end that B would follow, and leaves at least a quarter of the room.
        most_a = size - np.maximum(1, size // 4)
        length_a = np.minimum(divide - begin, most_a)
        stuck = np.flatnonzero(~divisible & ~other)
        inner = corpus.inner_sentences
        if len(inner):
            divide[stuck] = inner[np.searchsorted(inner, begin[stuck], side="right") % len(inner)]
            document = _last_before(documents, divide[stuck])
            low[stuck], high[stuck] = documents[document], documents[document + 1]
            wanted = 1 + (uniform[stuck, 3] * most_a[stuck]).astype(np.int64)
            length_a[stuck] = np.minimum(np.minimum(wanted, most_a[stuck]), divide[stuck] - low[stuck])
        else:  # no document has two sentences
            other[stuck] = True
        rest = size - length_a

        # Anywhere but in the same document: tokens are numbered as if it did not exist.
        token = (uniform[:, 5] * (num_tokens - (high - low))).astype(np.int64)
        token += np.where(token >= low, high - low, 0)
        document = _last_before(documents, token)
        other_low, other_high = documents[document], documents[document + 1]
        token = np.clip(token, other_low, np.maximum(other_low, other_high - rest))
        other_begin = sentences[_last_before(sentences, token)]
        begin_b = np.where(other, other_begin, divide)
        length_b = np.minimum(rest, np.where(other, other_high, high) - begin_b)
        return _Pairs(divide - length_a, length_a, begin_b, length_b, other.astype(np.int64))

    def _write(self, rows: Ints, start: Ints, number: int, pairs: _Pairs, out: Arrays) -> None:
        """Write the sequences with this number into their rows, each from `start`."""
        column = np.arange(self.layout.length)[None] - start[:, None]
        sep = 1 + pairs.length_a[:, None]
        end = pairs.length[:, None]
        in_a = (column >= 1) & (column < sep)
        in_b = (column > sep) & (column < end - 1)
        inside = (column >= 0) & (column < end)
        token = np.where(in_a, pairs.begin_a[:, None] + column - 1, pairs.begin_b[:, None] + column - sep - 1)
        token[~(in_a | in_b)] = 0
        values = self.corpus.tokens[token].astype(np.int32)
        values[column == 0] = self._cls
        values[(column == sep) | (column == end - 1)] = self._sep
        second = (inside & (column > sep)).astype(np.uint8)
        numbers = np.full(inside.shape, number + 1, np.uint8)
        for name, filled in (("tokens", values), ("segment", second), ("position", column), ("sequence", numbers)):
            if number == 0:
                np.copyto(out[name], filled, where=inside, casting="same_kind")
            else:
                out[name][rows] = np.where(inside, filled, out[name][rows])
        out["first"][rows, number] = start
        out["follows"][rows, number] = pairs.follows

    # --- masks --------------------------------------------------------------------------------------------------------

    def _hide(self, index: Ints, stream: int, lengths: Ints, out: Arrays) -> None:
        """Choose the tokens to predict, sequence by sequence, and mask most of them."""
        layout, tokens, sequence = self.layout, out["tokens"], out["sequence"]
        length, num_slots = layout.length, layout.num_slots
        words = counter_rng.words(stream, index, length + num_slots * _SLOT_DRAWS)

        # Sorted by (sequence, random number), with the position in the lowest bits; tokens not eligible come last.
        special = (tokens == self._cls) | (tokens == self._sep) | (sequence == 0)
        group = np.where(special, np.uint8(255), sequence)
        order = words[:, :length] >> np.uint64(24) << np.uint64(16) | np.arange(length, dtype=np.uint64)
        order |= group.astype(np.uint64) << np.uint64(56)
        order.sort(axis=1)
        by_chance = (order & np.uint64(0xFFFF)).astype(np.int32)

        numbers = range(1, layout.max_sequences + 1)
        candidates = np.stack([np.count_nonzero(group == number, axis=1) for number in numbers], axis=1)
        wanted = np.maximum(1, np.rint(layout.mask_share * lengths).astype(np.int64))
        wanted = np.minimum(wanted, candidates)
        ends = np.minimum(np.cumsum(wanted, axis=1), num_slots)
        slot = np.arange(num_slots)[None]
        source = np.broadcast_to(slot, (len(index), num_slots)).copy()
        for number in range(1, layout.max_sequences):
            # Slots of this sequence and later ones skip the tokens not chosen in the one before.
            source += np.where(slot >= ends[:, number - 1 : number], (candidates - wanted)[:, number - 1 : number], 0)
        used = slot < ends[:, -1:]
        places = np.where(used, np.take_along_axis(by_chance, np.minimum(source, length - 1), axis=1), 0)
        target = np.take_along_axis(tokens, places, axis=1).astype(np.int64)
        out["masked"][...] = places
        out["target"][...] = np.where(used, target, UNUSED)

        chance = (words[:, length:] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        what, which = chance[:, :num_slots], chance[:, num_slots:]
        ordinary = self.corpus.ordinary
        random = ordinary[(which * len(ordinary)).astype(np.int64)]
        shown = np.where(what < _MASK, self._mask, np.where(what < _MASK + _RANDOM, random, target))
        row, column = np.nonzero(used)
        tokens[row, places[row, column]] = shown[row, column]


def _spread(samples: Ints) -> Uniforms:
    """Return the fractional parts of multiples of the golden ratio: spread evenly over 0 … 1 for any number of them."""
    with np.errstate(over="ignore"):
        turned = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (turned >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _last_before(offsets: Ints, place: Ints) -> Ints:
    """Return the index of the part that contains each position; empty parts are skipped."""
    return np.searchsorted(offsets, place, side="right") - 1
