"""Text as tokens in a folder. `podium data make text` writes it, workloads on text read it.

    tokenizer.json         of the library `tokenizers`
    text.json              what is in the other files
    <split>.bin            all tokens of a split one after the other, little-endian uint16 or uint32
    <split>.sentences.npy  int64: where in the tokens each sentence begins, and the end
    <split>.documents.npy  int64: where in the sentences each document begins, and the end

Sentences of `bpe` and `char` hold their white space, and documents end with `<|endoftext|>`: put together, the tokens
give the text back. Sentences of `wordpiece` hold no special tokens.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from podium.data.cache import cache_folder
from podium.data.made import made_once, write_aside
from podium.data.text_documents import SPLITS, Document, SplitName, assign, documents_in, standard_library
from podium.errors import UserError, system_reason
from podium.schema import Section
from podium.table import Table

if TYPE_CHECKING:  # loads a library of machine code
    from tokenizers import Tokenizer

FORMAT = 1
Kind = Literal["wordpiece", "bpe", "char"]
DEFAULT_VOCABULARY = 8192
_FILE = "text.json"
#: Of larger texts, tokenizers learn from the first documents for training up to this many characters.
_LEARN_FROM = 64_000_000
_console = Console(stderr=True, highlight=False)


class TextMake(Section):
    """What `podium data make text` takes."""

    #: folder to write; null: in the cache
    out: Path | None = None
    #: files and folders to read; null: the source text of Python's standard library
    input: Path | tuple[Path, ...] | None = None
    tokenizer: Kind = "bpe"
    #: tokens at most; null: 8,192, and with char one for each character of the training text
    vocabulary: PositiveInt | None = None
    #: wordpiece: all letters small, without accents
    lowercase: bool = True

    @property
    def inputs(self) -> tuple[Path, ...] | None:
        return (self.input,) if isinstance(self.input, Path) else self.input

    @property
    def tokens(self) -> int | None:
        """The largest vocabulary; None with char: whatever it takes."""
        return self.vocabulary if self.vocabulary or self.tokenizer == "char" else DEFAULT_VOCABULARY


@dataclass(frozen=True)
class TextFolder:
    """A folder of tokens, as `text.json` describes it."""

    path: Path
    tokenizer_kind: Kind
    vocabulary: int
    dtype: np.dtype
    special: dict[str, int]
    splits: dict[str, dict[str, int]]
    source: str

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Read when it is first asked for."""
        return load_tokenizer(self.tokenizer_file)

    def tokens(self, split: SplitName) -> NDArray:
        """All tokens of a split, mapped into memory: nothing is read before it is used."""
        path, expected = self.path / f"{split}.bin", self.splits[split]["tokens"]
        try:
            if path.stat().st_size != expected * self.dtype.itemsize:
                raise UserError(f"{path} is damaged: it does not hold the {expected:,} tokens that {_FILE} tells of.")
            if expected == 0:
                return np.zeros(0, self.dtype)
            return np.asarray(np.memmap(path, self.dtype, "r"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {system_reason(error)}.") from error

    def sentences(self, split: SplitName) -> NDArray[np.int64]:
        """Where in the tokens each sentence begins, and the end."""
        return self._offsets(split, "sentences", self.splits[split]["tokens"])

    def documents(self, split: SplitName) -> NDArray[np.int64]:
        """Where in the sentences each document begins, and the end."""
        return self._offsets(split, "documents", self.splits[split]["sentences"])

    def _offsets(self, split: SplitName, what: str, last: int) -> NDArray[np.int64]:
        path = self.path / f"{split}.{what}.npy"
        try:
            offsets = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}.") from error
        if offsets.shape != (self.splits[split][what] + 1,) or offsets.dtype != np.int64 or offsets[-1] != last:
            raise UserError(f"{path} is damaged: it does not fit {_FILE}.")
        return cast(NDArray[np.int64], offsets)


def is_text_folder(path: Path) -> bool:
    return (path / _FILE).is_file()


def open_text(path: Path) -> TextFolder:
    """A folder that `podium data make text` wrote."""
    file = path / _FILE
    try:
        tree = json.loads(file.read_bytes())
        if tree["format"] != FORMAT:
            raise UserError(f"{file} has format {tree['format']}, this version reads {FORMAT}.")
        if tree["dtype"] not in ("uint16", "uint32") or tree["splits"].keys() != set(SPLITS):
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
    except OSError:
        raise UserError(f"{path} is no folder of text: `podium data make text` writes one.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged: make the text anew with `podium data make text`.") from None


def load_tokenizer(path: Path) -> "Tokenizer":
    """A tokenizer of a `tokenizer.json`: data only, nothing in it is executed."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}.") from error
    except Exception as error:  # the library raises no other type
        raise UserError(f"{path} holds no tokenizer: {error}.") from None


def text_table(text: TextFolder) -> Table:
    """What is in a folder, for a person."""
    rows = [
        [split, *(f"{text.splits[split][what]:,}" for what in ("documents", "sentences", "tokens"))] for split in SPLITS
    ]
    title = f"{text.path.name}: {text.tokenizer_kind}, {text.vocabulary:,} tokens in the vocabulary, {text.dtype.name}"
    return Table(title, ["split", "documents", "sentences", "tokens"], rows, f"From: {text.source}")


# --- making -------------------------------------------------------------------------------------------------------


def standard_text(tokenizer: Kind, vocabulary: int | None = None, lowercase: bool = True) -> TextFolder:
    """The standard library as tokens, in the cache; made now if it is not there."""
    section = TextMake(tokenizer=tokenizer, vocabulary=vocabulary, lowercase=lowercase)
    folder = _cached_folder(section)
    if folder.is_dir():
        _say(f"Text: Python's standard library, kept in {folder}")
    return open_text(made_once(folder, lambda aside: _make(aside, section), "The text"))


def make_text(section: TextMake) -> TextFolder:
    """What `podium data make text` does."""
    if section.out is None:
        if section.inputs is not None:
            raise UserError("`podium data make text` with input= needs out=FOLDER: where to put the tokens.")
        return standard_text(section.tokenizer, section.vocabulary, section.lowercase)
    folder = section.out.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: remove it, or choose another folder by out=FOLDER.")
    try:
        write_aside(folder, lambda aside: _make(aside, section))
    except OSError as error:
        raise UserError(f"The text cannot be written to {folder}: {system_reason(error)}.") from error
    return open_text(folder)


def _cached_folder(section: TextMake) -> Path:
    size = "" if section.tokens is None else f"-{section.tokens}"
    case = "-cased" if section.tokenizer == "wordpiece" and not section.lowercase else ""
    return cache_folder("text", f"v{FORMAT}-python{platform.python_version()}-{section.tokenizer}{size}{case}")


def _make(folder: Path, section: TextMake) -> None:
    from podium.data.text_tokenizers import SPECIAL, train_tokenizer

    inputs = section.inputs
    documents = standard_library() if inputs is None else documents_in(inputs)
    splits = assign(documents)
    if not any(document.sentences() for document in splits["train"]):
        raise UserError("There is no text to make tokens of: none of the files is UTF-8 text.")
    named = f"Python {platform.python_version()} standard library" if inputs is None else [p.name for p in inputs]
    _say(f"Reading {len(documents):,} files, and learning which tokens they are best written in")
    tokenizer = train_tokenizer(
        section.tokenizer, lambda: _learnt_from(splits["train"]), section.tokens, section.lowercase
    )
    vocabulary = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    columns = (TextColumn("tokens"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    counts = {}
    with Progress(*columns, console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task("", total=sum(map(len, splits.values())))
        for split in SPLITS:
            counts[split] = _write_split(
                folder, split, splits[split], tokenizer, section.tokenizer, dtype, lambda: bar.advance(task)
            )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    tree = {
        "format": FORMAT,
        "tokenizer": section.tokenizer,
        "vocabulary": vocabulary,
        "dtype": dtype.name,
        "special": {token: tokenizer.token_to_id(token) for token in SPECIAL[section.tokenizer]},
        "splits": counts,
        "source": named,
    }
    (folder / _FILE).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def _learnt_from(documents: Iterable[Document]) -> Iterable[list[str]]:
    num_characters = 0
    for document in documents:
        if num_characters >= _LEARN_FROM:
            return
        sentences = document.sentences()
        num_characters += sum(map(len, sentences))
        yield sentences


def _write_split(
    folder: Path,
    split: SplitName,
    documents: Iterable[Document],
    tokenizer: Any,
    kind: Kind,
    dtype: np.dtype,
    advance: Any,
) -> dict[str, int]:
    from podium.data.text_tokenizers import END

    end = END[kind]
    # Text that looks like a special token is text.
    tokenizer.encode_special_tokens = True
    closing = [] if end is None else [tokenizer.token_to_id(end)]
    lengths: list[int] = []
    starts = [0]
    with (folder / f"{split}.bin").open("wb") as file:
        for document in documents:
            sentences = document.sentences()
            coded = [one.ids for one in tokenizer.encode_batch_fast(sentences, add_special_tokens=False)]
            coded = [ids for ids in coded if ids]  # wordpiece leaves nothing of control characters
            if coded:
                coded[-1] = coded[-1] + closing
                file.write(np.array([token for ids in coded for token in ids], dtype).tobytes())
                lengths += map(len, coded)
                starts.append(len(lengths))
            advance()
    tokenizer.encode_special_tokens = False
    np.save(folder / f"{split}.sentences.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    np.save(folder / f"{split}.documents.npy", np.array(starts, np.int64))
    return {"tokens": sum(lengths), "sentences": len(lengths), "documents": len(starts) - 1}


def _say(text: str) -> None:
    _console.print(escape(text), soft_wrap=True)
