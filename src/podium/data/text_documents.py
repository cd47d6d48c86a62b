"""Documents of text: which files there are, what is in them, where their sentences end, which split each belongs to.

A document is a file. A sentence is a line that is not blank or, in prose (.txt, .md, .rst), what ends with . ! or ?
before white space, or before a blank line. White space after a sentence belongs to it, so sentences put together are
the document again.
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

from podium.errors import UserError

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
#: Folders of the standard library that are left out: tests (more than all the rest), tables of characters, manuals
#: written as strings, and packages that others installed.
_SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
#: Shares of the documents, from the end: test, valid; the rest is for training.
_SHARE = 0.05
_PROSE = {".txt", ".md", ".rst"}
_LINE_END = re.compile(r"\n(?:[^\S\n]*\n)*")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|\n[^\S\n]*\n\s*")


@dataclass(frozen=True)
class Document:
    """A file, by the name that decides its split; or a part of it, as shares of its sentences."""

    name: str
    path: Path
    first: float = 0.0
    last: float = 1.0

    def sentences(self) -> list[str]:
        """All of it; nothing where the file is no text."""
        text = read_text(self.path)
        found = split_sentences(text, prose=self.path.suffix.lower() in _PROSE) if text else []
        first, last = (math.ceil(share * len(found) - 1e-6) for share in (self.first, self.last))
        return found[first:last]


def read_text(path: Path) -> str | None:
    """The text of a file, to the character; None where it is none (it must be UTF-8 without zeros)."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    return None if "\0" in text else text


def split_sentences(text: str, prose: bool) -> list[str]:
    """The sentences of a text, each with the white space behind it; the first with what is before it."""
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
    """The source files of the running interpreter's standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    return [Document(name, path) for name, path in _files_below(root, _SKIPPED) if path.suffix == ".py"]


def documents_in(inputs: Sequence[Path]) -> list[Document]:
    """All files of these folders, and these files, in the order given and then of their names; none twice."""
    documents: dict[Path, Document] = {}
    for given in inputs:
        path = given.expanduser()
        if path.is_dir():
            found = [Document(f"{path.resolve().name}/{name}", file) for name, file in _files_below(path)]
        elif path.is_file():
            found = [Document(path.name, path)]
        else:
            raise UserError(f"There is no file or folder {given} to read text from.")
        for document in found:
            documents.setdefault(document.path.resolve(), document)
    return list(documents.values())


def _files_below(root: Path, skipped: Set[str] = frozenset()) -> list[tuple[str, Path]]:
    """(name below `root`, path) of all files, sorted, the same on every system. Hidden ones are left out."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]  # where to go on
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def assign(documents: Sequence[Document]) -> dict[SplitName, list[Document]]:
    """Documents by split, by a hash of their names: about 90, 5 and 5 %, at least one in each.

    Fewer than three documents are cut: the last sentences of each are for validation and test.
    """
    if len(documents) < len(SPLITS):
        cuts = (0.0, 1 - 2 * _SHARE, 1 - _SHARE, 1.0)
        return {
            split: [Document(document.name, document.path, *cuts[place : place + 2]) for document in documents]
            for place, split in enumerate(SPLITS)
        }
    ranked = sorted((_share(document.name), place) for place, document in enumerate(documents))
    num_test = max(1, sum(share >= 1 - _SHARE for share, _ in ranked))
    num_held = max(1 + num_test, sum(share >= 1 - 2 * _SHARE for share, _ in ranked))
    num_held = min(num_held, len(documents) - 1)
    num_test = min(num_test, num_held - 1)
    cut = {"train": ranked[:-num_held], "valid": ranked[-num_held:-num_test], "test": ranked[-num_test:]}
    return {split: [documents[place] for place in sorted(place for _, place in cut[split])] for split in SPLITS}


def _share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
