"""Tokens for gpt2: from tokenized text, from files of tokens, or random."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from podium.contract import Split
from podium.data.sample_plan import spread_evenly
from podium.data.source import Field as ArrayField
from podium.data.source import Source
from podium.data.sources.generated import GeneratedSource
from podium.data.sources.subset import subset
from podium.data.text.folder import TextFolder, is_text_folder, load_tokenizer, open_text
from podium.data.text.make import standard_library_text, text_of
from podium.data.text.token_windows import TokenWindows, described_vocabulary, largest_token, open_tokens
from podium.errors import UserError
from podium.ui.console import say
from podium.workloads.gpt2.section import Gpt2Data

if TYPE_CHECKING:  # imports a compiled library
    from tokenizers import Tokenizer

#: GPT-2's own
PUBLISHED_VOCABULARY = 50_257
_END = "<|endoftext|>"
#: names of files in a folder of token files
_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "val"),
    "test": ("test", "valid", "val"),
}


#: all of them, as they may lie in a folder
_FOLDER_NAMES = tuple(dict.fromkeys(name for names in _NAMES.values() for name in names))


class Tokens:
    """The tokens of a `workload.data` section, opened on first use."""

    def __init__(self, section: Gpt2Data) -> None:
        self._section = section
        self._text: TextFolder | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def text(self) -> TextFolder | None:
        """Return the folder of tokenized text, created first if necessary; None with other sources."""
        section = self._section
        if self._text is None and section.source == "text":
            if section.path is None:
                self._text = standard_library_text(section.tokenizer, section.vocabulary)
            else:
                self._text = _opened(section.path.expanduser(), section)
        return self._text

    @property
    def vocabulary(self) -> int | None:
        """Return the number of tokens in the vocabulary that comes with the data; None if none does."""
        if self.text is not None:
            return self.text.vocabulary
        return None if self.tokenizer is None else self.tokenizer.get_vocab_size()

    def counted_vocabulary(self) -> int | None:
        """Return the vocabulary of token files that come without one, from `meta.json` or the largest token in them;
        None with other sources."""
        section = self._section
        if section.source != "files" or section.path is None:
            return None
        path = section.path.expanduser()
        if path.is_dir():
            paths = [path / f"{name}.bin" for name in _FOLDER_NAMES if (path / f"{name}.bin").is_file()]
            described = described_vocabulary(path / "meta.json")
        else:
            paths, described = [path], None
        found = described or 1 + max((largest_token(open_tokens(p, section.dtype)) for p in paths), default=0)
        reason = "by meta.json" if described else f"the largest token of {' and '.join(p.name for p in paths)} plus one"
        unread = " (meta.pkl is not read: such files can run code)" if (path / "meta.pkl").is_file() else ""
        say(f"Vocabulary: {found:,} tokens, {reason}{unread}; workload.model.vocabulary sets another")
        return found

    @property
    def tokenizer_file(self) -> Path | None:
        """Return the tokenizer's file beside the tokens, if there is one."""
        section = self._section
        if self.text is not None:
            return self.text.tokenizer_file
        if section.source == "generated" or section.path is None:
            return None
        path = section.path.expanduser()
        file = (path if path.is_dir() else path.parent) / "tokenizer.json"
        return file if file.is_file() else None

    @property
    def tokenizer(self) -> "Tokenizer | None":
        if self._tokenizer is None and self.tokenizer_file is not None:
            self._tokenizer = load_tokenizer(self.tokenizer_file)
        return self._tokenizer

    @property
    def end(self) -> int | None:
        """Return the token between documents, if there is one."""
        return None if self.tokenizer is None else self.tokenizer.token_to_id(_END)

    def source(self, split: Split, length: int, vocabulary: int) -> Source:
        """Return windows of `length` + 1 tokens below `vocabulary`."""
        section = self._section
        if section.source == "generated":
            first, num = (0, section.samples) if split == "train" else (section.samples, section.test_samples)
            first += section.test_samples if split == "test" else 0
            fields = {"tokens": ArrayField((length + 1,), np.int32)}
            return GeneratedSource(
                fields,
                min(num, section.max_samples or num),
                ranges={"tokens": (0, vocabulary)},
                seed=section.sample_seed,
                first_sample=first,
            )
        tokens, where = self._tokens(split)
        windows = TokenWindows(
            tokens, length, vocabulary, where, section.stride if split == "train" else section.valid_stride
        )
        if section.max_samples is None or section.max_samples >= len(windows):
            return windows
        numbers = np.arange(section.max_samples)
        # Neighbours are alike: the first windows of a split say little about the rest.
        return subset(windows, numbers if split == "train" else spread_evenly(numbers, len(numbers), len(windows)))

    def _tokens(self, split: Split) -> tuple[np.ndarray, str]:
        """Return all tokens of a split, and a name for error messages."""
        section = self._section
        if self.text is not None:
            return self.text.tokens(split), f"{self.text.path / f'{split}.bin'}"
        if section.path is None:
            raise UserError("workload.data.path is missing: workload.data.source = files needs it")
        path = section.path.expanduser()
        if path.is_dir():
            for name in _NAMES[split]:
                if (path / f"{name}.bin").is_file():
                    found = open_tokens(path / f"{name}.bin", section.dtype)
                    return found.tokens, str(found.path)
            raise UserError(f"there is no file {path / _NAMES[split][0]}.bin")
        found = open_tokens(path, section.dtype)
        num_held = int(section.held_out * len(found.tokens))
        cuts = {"train": (0, -2 * num_held), "valid": (-2 * num_held, -num_held), "test": (-num_held, None)}
        begin, end = cuts[split] if num_held else (0, 0)
        return found.tokens[begin:end], f"{found.path} ({split})"


def _opened(path: Path, section: Gpt2Data) -> TextFolder:
    """Open tokenized text, or tokenize a file of text."""
    if path.is_file():
        return text_of((path,), section.tokenizer, section.vocabulary)
    if not path.exists():
        raise UserError(f"workload.data.path = {path}: there is no such file or folder")
    if not is_text_folder(path) and any((path / f"{name}.bin").is_file() for name in _FOLDER_NAMES):
        raise UserError(f"{path} holds files of tokens: set workload.data.source=files")
    text = open_text(path)
    if section.vocabulary is not None and text.vocabulary > section.vocabulary:
        raise UserError(
            f"workload.data.vocabulary = {section.vocabulary}: expected null or at least the {text.vocabulary:,} "
            f"tokens of {path}"
        )
    return text
