"""Documents of text: which files there are, what is in them, where their sentences end, which split each is in.

A document is a file. A sentence is a line that is not blank or, in prose (.txt, .md, .rst), what ends with . ! or ?
before white space, or before a blank line. White space after a sentence belongs to it, so that the sentences put
together are the document again.
"""

import hashlib
import math
import os
import re
import sysconfig
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podium.errors import UserError, system_reason
from podium.machine.bounded_files import read_limited

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
#: Folders of the standard library that are left out: tests (more than all the rest), tables of characters, manuals
#: written as strings, and installed packages.
_SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
#: Share of the documents for validation, and for test; the rest is for training.
SHARE = 0.05
#: far more than any text that fits into memory in one piece
_TEXT_BYTES = 1 << 36
_PROSE = {".txt", ".md", ".rst"}
_LINE_END = re.compile(r"\n(?:[^\S\n]*\n)*")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|\n[^\S\n]*\n\s*")


@dataclass(frozen=True)
class Document:
    """A file, with the name that decides its split; or a part of it, as shares of its sentences."""

    name: str
    path: Path
    first: float = 0.0
    last: float = 1.0

    def sentences(self) -> list[str]:
        """Return all its sentences; none if the file is not text."""
        text = read_text(self.path)
        found = split_sentences(text, prose=self.path.suffix.lower() in _PROSE) if text else []
        first, last = (math.ceil(share * len(found) - 1e-6) for share in (self.first, self.last))
        return found[first:last]

    def num_characters(self) -> int:
        """Return how much text it holds."""
        if (self.first, self.last) == (0.0, 1.0):
            text = read_text(self.path)
            return len(text) if text and not text.isspace() else 0
        return sum(map(len, self.sentences()))


def read_text(path: Path) -> str | None:
    """Return the text of a file, to the character; None if it is not text (UTF-8 without zeros)."""
    try:
        text = read_limited(path, _TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {system_reason(error)}") from error
    return None if "\0" in text else text


def split_sentences(text: str, prose: bool) -> list[str]:
    """Split a text into sentences, each with the white space after it, the first also with what is before it."""
    ends = [match.end() for match in (_SENTENCE_END if prose else _LINE_END).finditer(text)]
    sentences, start = [], 0
    for end in [*ends, len(text)]:
        if text[start:end].strip():
            sentences.append(text[start:end])
            start = end
    if sentences:
        sentences[-1] += text[start:]
    return sentences


def standard_library() -> list[Document]:
    """Return the source files of the running interpreter's standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    return [Document(name, path) for name, path in _files_below(root, _SKIPPED) if path.suffix == ".py"]


def documents_in(inputs: Sequence[Path]) -> list[Document]:
    """Return all files of these folders, and these files, in the given order and then by name; none twice."""
    documents: dict[Path, Document] = {}
    for given in inputs:
        path = given.expanduser()
        if path.is_dir():
            found = [Document(f"{path.resolve().name}/{name}", file) for name, file in _files_below(path)]
        elif path.is_file():
            found = [Document(path.name, path)]
        else:
            raise UserError(f"There is no file or folder {given} to read text from")
        for document in found:
            documents.setdefault(document.path.resolve(), document)
    return list(documents.values())


def _files_below(root: Path, skipped: Set[str] = frozenset()) -> list[tuple[str, Path]]:
    """Return (name below `root`, path) of all files, sorted, the same on every system. Hidden ones are left out."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]  # what os.walk enters
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def assign_splits(documents: Sequence[Document]) -> dict[SplitName, list[Document]]:
    """Return the documents of each split, by a hash of their names: about 90, 5 and 5 %, at least one in each.

    Fewer than three documents are cut: the last sentences of each are for validation and test.
    """
    if len(documents) < len(SPLITS):
        cuts = (0.0, 1 - 2 * SHARE, 1 - SHARE, 1.0)
        return {
            split: [Document(document.name, document.path, *cuts[place : place + 2]) for document in documents]
            for place, split in enumerate(SPLITS)
        }
    ranked = sorted((_share(document.name), place) for place, document in enumerate(documents))
    num_test = max(1, sum(share >= 1 - SHARE for share, _ in ranked))
    num_held_out = max(1 + num_test, sum(share >= 1 - 2 * SHARE for share, _ in ranked))
    num_held_out = min(num_held_out, len(documents) - 1)
    num_test = min(num_test, num_held_out - 1)
    cut = {"train": ranked[:-num_held_out], "valid": ranked[-num_held_out:-num_test], "test": ranked[-num_test:]}
    return {split: [documents[place] for place in sorted(place for _, place in cut[split])] for split in SPLITS}


def _share(name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
