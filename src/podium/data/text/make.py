"""`podium data make text`: files become documents, a tokenizer is trained on them, and their tokens go into a folder.

`folder.py` describes the folder. Documents go to the splits by a hash of their names (`documents.py`). Where that
leaves a split next to nothing, because there are few documents or very unequal ones, the tokens are cut instead.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from podium.data.text.documents import SHARE, SPLITS, Document, SplitName, assign_splits, documents_in, standard_library
from podium.data.text.folder import DESCRIPTION, FORMAT, TOKENIZER_FILE, Kind, TextFolder, is_text_folder, open_text
from podium.errors import UserError, system_reason
from podium.machine.atomic_files import create_folder, create_once
from podium.machine.cache_folder import cache_folder
from podium.recipe.section import Section
from podium.ui.console import say, warn
from podium.ui.progress_bar import progress_bar

DEFAULT_VOCABULARY = 8192
#: Of larger texts, tokenizers learn from the first training documents, up to this many characters.
_TRAINING_CHARACTERS = 64_000_000
#: where a split would have a smaller share of all characters, tokens are divided instead of documents
_MIN_SHARE = SHARE / 5


class TextMake(Section):
    """What `podium data make text` takes."""

    #: folder to write; null: in the cache, under a hash of the text
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
    def max_tokens(self) -> int | None:
        """The largest vocabulary; None with char: as many as there are characters."""
        return self.vocabulary if self.vocabulary or self.tokenizer == "char" else DEFAULT_VOCABULARY


def standard_library_text(tokenizer: Kind, vocabulary: int | None = None, lowercase: bool = True) -> TextFolder:
    """Return the standard library as tokens, in the cache; created now if it is not there yet."""
    section = TextMake(tokenizer=tokenizer, vocabulary=vocabulary, lowercase=lowercase)
    folder = _cache_folder(section)
    if folder.is_dir():
        say(f"Text: Python's standard library, kept in {folder}")
    return open_text(create_once(folder, lambda temporary: _make(temporary, section), "The text"))


def text_of(
    inputs: tuple[Path, ...], tokenizer: Kind, vocabulary: int | None = None, lowercase: bool = True
) -> TextFolder:
    """Return files of text as tokens, in the cache under a hash of what they hold; created now if not there yet."""
    section = TextMake(input=inputs, tokenizer=tokenizer, vocabulary=vocabulary, lowercase=lowercase)
    folder = _cache_folder(section)
    named = ", ".join(path.name for path in inputs)
    if folder.is_dir():
        say(f"Text: {named}, kept as tokens in {folder}")
    return _told_if_empty(open_text(create_once(folder, lambda temporary: _make(temporary, section), "The text")))


def make_text(section: TextMake, *, replace: bool = False) -> TextFolder:
    """Write the folder that `section` describes; `replace` lets it take the place of an earlier text."""
    if section.out is None:
        if section.inputs is not None:
            return text_of(section.inputs, section.tokenizer, section.vocabulary, section.lowercase)
        return standard_library_text(section.tokenizer, section.vocabulary, section.lowercase)
    folder = section.out.expanduser()
    if replace:
        _check_replaceable(folder)
    try:
        create_folder(folder, lambda temporary: _make(temporary, section), replace=replace)
    except OSError as error:
        raise UserError(f"The text cannot be written to {folder}: {system_reason(error)}") from error
    return _told_if_empty(open_text(folder))


def _told_if_empty(text: TextFolder) -> TextFolder:
    empty = [split for split in SPLITS if text.splits[split]["tokens"] == 0]
    if empty:
        warn(
            f"there is too little text for {' and '.join(empty)}: training on {text.path} will stop with an error; "
            f"make the text from more files with `input=`"
        )
    return text


def _check_replaceable(folder: Path) -> None:
    """Raise unless `folder` holds nothing but an earlier text: replacing it deletes what is in it."""
    if not folder.exists():
        return
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    own = {DESCRIPTION, TOKENIZER_FILE}
    own |= {f"{split}.{end}" for split in SPLITS for end in ("bin", "sentences.npy", "documents.npy")}
    if present and (not is_text_folder(folder) or present - own):
        other = min(present - own, default=folder.name)
        raise UserError(f"{folder} holds {other}, which is no part of a text: choose another folder with `out=FOLDER`")


def _cache_folder(section: TextMake) -> Path:
    size = "" if section.max_tokens is None else f"-{section.max_tokens}"
    case = "-cased" if section.tokenizer == "wordpiece" and not section.lowercase else ""
    inputs = section.inputs
    text = f"python{platform.python_version()}" if inputs is None else f"{inputs[0].stem[:40]}-{_digest(inputs)}"
    return cache_folder("text", f"v{FORMAT}-{text}-{section.tokenizer}{size}{case}")


def _digest(inputs: tuple[Path, ...]) -> str:
    """Return a hash of the names and contents of all files."""
    digest = hashlib.blake2b(digest_size=12)
    for document in documents_in(inputs):
        digest.update(f"{document.name}\0".encode())
        try:
            with document.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise UserError(f"{document.path} cannot be read: {system_reason(error)}") from error
    return digest.hexdigest()


def _make(folder: Path, section: TextMake) -> None:
    from podium.data.text.tokenizers import SPECIAL_TOKENS, train_tokenizer

    inputs = section.inputs
    documents = standard_library() if inputs is None else documents_in(inputs)
    splits = assign_splits(documents)
    sizes = {split: sum(document.num_characters() for document in splits[split]) for split in SPLITS}
    if not any(sizes.values()):
        raise UserError("There is no text to tokenize: none of the files is UTF-8 text")
    by_tokens = min(sizes.values()) < _MIN_SHARE * sum(sizes.values())
    if by_tokens:
        splits = {"train": documents, "valid": [], "test": []}
    named = f"Python {platform.python_version()} standard library" if inputs is None else [p.name for p in inputs]
    many = len(documents) != 1
    say(f"Reading {len(documents):,} file{'s' if many else ''} and training a tokenizer on {'them' if many else 'it'}")
    tokenizer = train_tokenizer(
        section.tokenizer, lambda: _training_text(splits["train"]), section.max_tokens, section.lowercase
    )
    vocabulary = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    num_parts, done = sum(map(len, splits.values())), 0
    counts: dict[SplitName, dict[str, int]] = {}
    with progress_bar("tokenizing", counted=True) as show:

        def advance() -> None:
            nonlocal done
            done += 1
            show(done, num_parts)

        for split in SPLITS:
            counts[split] = _write_split(folder, split, splits[split], tokenizer, section.tokenizer, dtype, advance)
    if by_tokens:
        say("There are too few documents to divide, or too unequal ones: the last tokens are for validation and test")
        counts = _cut_tokens(folder, dtype)
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    tree = {
        "format": FORMAT,
        "tokenizer": section.tokenizer,
        "vocabulary": vocabulary,
        "dtype": dtype.name,
        "special": {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS[section.tokenizer]},
        "splits": counts,
        "source": named,
    }
    (folder / DESCRIPTION).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def _training_text(documents: Iterable[Document]) -> Iterable[list[str]]:
    num_characters = 0
    for document in documents:
        if num_characters >= _TRAINING_CHARACTERS:
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
    advance: Callable[[], None],
) -> dict[str, int]:
    """Write the tokens of a split and where its sentences and documents begin; return how many there are of each."""
    from podium.data.text.tokenizers import END_OF_DOCUMENT

    end = END_OF_DOCUMENT[kind]
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
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return _write_offsets(folder, split, ends, np.array(starts, np.int64))


def _write_offsets(
    folder: Path, split: SplitName, sentences: NDArray[np.int64], documents: NDArray[np.int64]
) -> dict[str, int]:
    np.save(folder / f"{split}.sentences.npy", sentences)
    np.save(folder / f"{split}.documents.npy", documents)
    return {"tokens": int(sentences[-1]), "sentences": len(sentences) - 1, "documents": len(documents) - 1}


def _cut_tokens(folder: Path, dtype: np.dtype) -> dict[SplitName, dict[str, int]]:
    """Divide the tokens of the training split between all splits, 90 : 5 : 5; return the counts of each."""
    tokens = np.fromfile(folder / "train.bin", dtype)
    sentences, documents = (np.load(folder / f"train.{what}.npy") for what in ("sentences", "documents"))
    num_held_out = max(1, int(SHARE * len(tokens))) if len(tokens) >= len(SPLITS) else 0
    cuts = (0, len(tokens) - 2 * num_held_out, len(tokens) - num_held_out, len(tokens))
    counts: dict[SplitName, dict[str, int]] = {}
    for split, first, last in zip(SPLITS, cuts[:-1], cuts[1:], strict=True):
        tokens[first:last].tofile(folder / f"{split}.bin")
        # A sentence or document that is cut is one in both splits.
        own_sentences = np.unique(np.clip(sentences, first, last))
        own_documents = np.searchsorted(own_sentences, np.unique(np.clip(sentences[documents], first, last)))
        counts[split] = _write_offsets(folder, split, own_sentences - first, own_documents.astype(np.int64))
    return counts
