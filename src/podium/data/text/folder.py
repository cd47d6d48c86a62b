"""Text as tokens in a folder. `make.py` writes it for `podium data make text`, workloads on text read it.

    tokenizer.json         of the library `tokenizers`
    text.json              what is in the other files
    <split>.bin            all tokens of a split one after the other, little-endian uint16 or uint32
    <split>.sentences.npy  int64: where in the tokens each sentence begins, and the end
    <split>.documents.npy  int64: where in the sentences each document begins, and the end

Sentences of `bpe` and `char` hold their white space, and documents end with `<|endoftext|>`: put together, the tokens
give the text back. Sentences of `wordpiece` hold no special tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from podium.data.formats.npy import read_npy
from podium.data.text.documents import SPLITS, SplitName
from podium.errors import UserError, system_reason
from podium.machine.bounded_files import FACTS_BYTES, parse_mapping, read_limited
from podium.ui.table import Table

if TYPE_CHECKING:  # loads a library of machine code
    from tokenizers import Tokenizer

FORMAT = 1
Kind = Literal["wordpiece", "bpe", "char"]
DESCRIPTION = "text.json"
_TOKENIZER_BYTES = 256 << 20
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TextFolder:
    """A folder of tokens, as its `text.json` describes it."""

    path: Path
    tokenizer_kind: Kind
    vocabulary: int
    dtype: np.dtype
    special: dict[str, int]
    splits: dict[str, dict[str, int]]
    source: str

    @property
    def tokenizer_file(self) -> Path:
        return self.path / TOKENIZER_FILE

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer, read on first use."""
        return load_tokenizer(self.tokenizer_file)

    def tokens(self, split: SplitName) -> NDArray:
        """Return all tokens of a split, mapped into memory: nothing is read before it is used."""
        path, expected = self.path / f"{split}.bin", self.splits[split]["tokens"]
        try:
            if path.stat().st_size != expected * self.dtype.itemsize:
                raise UserError(
                    f"{path} is damaged: it does not hold the {expected:,} tokens that {DESCRIPTION} promises"
                )
            if expected == 0:
                return np.zeros(0, self.dtype)
            return np.asarray(np.memmap(path, self.dtype, "r"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {system_reason(error)}") from error

    def sentences(self, split: SplitName) -> NDArray[np.int64]:
        """Return where in the tokens each sentence begins, and the end."""
        return self._offsets(split, "sentences", self.splits[split]["tokens"])

    def documents(self, split: SplitName) -> NDArray[np.int64]:
        """Return where in the sentences each document begins, and the end."""
        return self._offsets(split, "documents", self.splits[split]["sentences"])

    def _offsets(self, split: SplitName, what: str, last: int) -> NDArray[np.int64]:
        path = self.path / f"{split}.{what}.npy"
        try:
            offsets = read_npy(path)
        except (OSError, ValueError) as error:
            reason = system_reason(error) if isinstance(error, OSError) else error
            raise UserError(f"{path} cannot be read: {reason}") from error
        fits = offsets.shape == (self.splits[split][what] + 1,) and offsets.dtype == np.int64
        if not fits or offsets[0] != 0 or offsets[-1] != last or (np.diff(offsets) < 0).any():
            raise UserError(f"{path} is damaged: it does not match {DESCRIPTION}")
        return cast(NDArray[np.int64], offsets)


def is_text_folder(path: Path) -> bool:
    """Return whether `podium data make text` wrote this folder."""
    return (path / DESCRIPTION).is_file()


def open_text(path: Path) -> TextFolder:
    """Open a folder that `podium data make text` wrote."""
    file = path / DESCRIPTION
    try:
        tree = parse_mapping(read_limited(file, FACTS_BYTES))
        if tree["format"] != FORMAT:
            raise UserError(f"{file} has format {str(tree['format'])[:20]}, but this version reads {FORMAT}")
        if tree["dtype"] not in ("uint16", "uint32") or tree["splits"].keys() != set(SPLITS):
            raise ValueError
        counts = [split[what] for split in tree["splits"].values() for what in ("tokens", "sentences", "documents")]
        numbers = [*counts, tree["vocabulary"], *tree["special"].values()]
        if tree["tokenizer"] not in get_args(Kind) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise ValueError
        return TextFolder(
            path,
            tree["tokenizer"],
            int(tree["vocabulary"]),
            np.dtype(tree["dtype"]).newbyteorder("<"),
            dict(tree["special"]),
            {name: {key: int(value) for key, value in counts.items()} for name, counts in tree["splits"].items()},
            tree["source"] if isinstance(tree["source"], str) else ", ".join(tree["source"]),
        )
    except FileNotFoundError:
        raise UserError(f"{path} is not a folder of text: `podium data make text` writes one") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {system_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged: make the text again with `podium data make text`") from None


def load_tokenizer(path: Path) -> "Tokenizer":
    """Load the tokenizer of a `tokenizer.json`: data only, nothing in it is executed."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_limited(path, _TOKENIZER_BYTES))
        tokenizer.encode("Some 1 text, é")  # parts that do not go together are found out on first use only
        return tokenizer
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from error
    except Exception as error:  # the library raises no other type
        raise UserError(f"{path} holds no tokenizer: {' '.join(str(error).split())[:300]}") from None


def text_table(text: TextFolder) -> Table:
    """Return a table of what is in a folder."""
    rows = [
        [split, *(f"{text.splits[split][what]:,}" for what in ("documents", "sentences", "tokens"))] for split in SPLITS
    ]
    title = f"{text.path.name}: {text.tokenizer_kind}, {text.vocabulary:,} tokens in the vocabulary, {text.dtype.name}"
    return Table(title, ["split", "documents", "sentences", "tokens"], rows, f"From: {text.source}")
