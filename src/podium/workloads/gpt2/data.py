"""Tokens for gpt2: from tokenized text, from files of tokens, or random."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from podium.contract import Split
from podium.data.source import Field as ArrayField
from podium.data.source import Source
from podium.data.sources.generated import GeneratedSource
from podium.data.text.folder import TextFolder, load_tokenizer, open_text
from podium.data.text.make import standard_library_text
from podium.data.text.token_windows import TokenWindows, open_tokens
from podium.errors import UserError
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
                self._text = open_text(section.path.expanduser())
        return self._text

    @property
    def vocabulary(self) -> int | None:
        """Return the number of tokens in the data's vocabulary; None if unknown."""
        if self.text is not None:
            return self.text.vocabulary
        return None if self.tokenizer is None else self.tokenizer.get_vocab_size()

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
        stride = section.stride or length
        if section.max_samples is not None:
            tokens = tokens[: (section.max_samples - 1) * stride + length + 1]
        return TokenWindows(tokens, length, vocabulary, where, stride)

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
