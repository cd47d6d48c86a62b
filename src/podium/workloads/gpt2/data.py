"""Tokens for gpt2: made text, files of tokens, or random ones. Owns `workload.data`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from podium.data.arrays import Field as ArrayField
from podium.data.arrays import Source
from podium.data.generated import GeneratedSource
from podium.data.text import TextFolder, load_tokenizer, open_text, standard_text
from podium.data.tokens import TokenWindows, open_tokens
from podium.errors import UserError
from podium.schema import Section
from podium.workloads.base import Split

if TYPE_CHECKING:  # loads a library of machine code
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


class SampleSection(Section):
    """The text that `podium predict` lets the model write."""

    #: what it goes on from; empty: the beginning of a document
    prompt: str = ""
    #: how many texts, and how many tokens of each
    texts: PositiveInt = 3
    tokens: PositiveInt = 256
    #: below 1 surer, above 1 bolder than the model is; 0: always the likeliest token
    temperature: Annotated[float, Field(ge=0)] = 0.8
    #: only among the likeliest so many; null: all
    top_k: PositiveInt | None = 50
    seed: NonNegativeInt = 0


class Gpt2Data(Section):
    """`workload.data` of gpt2."""

    #: text: of `podium data make text`; files: of tokens, flat or indexed; generated: random tokens, for speed
    source: Literal["text", "files", "generated"] = "text"
    #: text: its folder, null: Python's standard library, made on first use; files: a .bin, or a folder of train.bin, …
    path: Path | None = None
    #: text without a path: what it is made into
    tokenizer: Literal["bpe", "char"] = "bpe"
    vocabulary: PositiveInt | None = None
    #: of flat files
    dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    #: one file for all splits: the last two shares of this size are for validation and test
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    #: tokens of a window that are predicted; null: the model's context
    length: PositiveInt | None = None
    #: tokens from the beginning of a window to that of the next; null: their length
    stride: PositiveInt | None = None
    #: at most so many windows of each split
    max_samples: PositiveInt | None = None
    #: generated: how many there are of each, and what they are drawn from
    samples: PositiveInt = 10_000
    test_samples: PositiveInt = 1_000
    sample_seed: NonNegativeInt = 0
    sample: SampleSection = SampleSection()

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        if self.source == "text" and self.path is not None and self.vocabulary is not None:
            raise ValueError("vocabulary says how to make text, but path names a folder where it is made already")
        return self


class Tokens:
    """The tokens of a `workload.data` section, opened as they are asked for."""

    def __init__(self, section: Gpt2Data) -> None:
        self._section = section
        self._text: TextFolder | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def text(self) -> TextFolder | None:
        """Where the tokens are made text; made now if it does not exist yet."""
        section = self._section
        if self._text is None and section.source == "text":
            if section.path is None:
                self._text = standard_text(section.tokenizer, section.vocabulary)
            else:
                self._text = open_text(section.path.expanduser())
        return self._text

    @property
    def vocabulary(self) -> int | None:
        """As many tokens as the data has; None where it does not say."""
        if self.text is not None:
            return self.text.vocabulary
        return None if self.tokenizer is None else self.tokenizer.get_vocab_size()

    @property
    def tokenizer_file(self) -> Path | None:
        """Beside the tokens, where there is one."""
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
        """The token between documents, where there is one."""
        return None if self.tokenizer is None else self.tokenizer.token_to_id(_END)

    def source(self, split: Split, length: int, vocabulary: int) -> Source:
        """Windows of `length` + 1 tokens below `vocabulary`."""
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
        """All tokens of a split, and what to call them."""
        section = self._section
        if self.text is not None:
            return self.text.tokens(split), f"{self.text.path / f'{split}.bin'}"
        if section.path is None:
            raise UserError(
                "`workload.data.source` is files, but `workload.data.path` does not say where the tokens are."
            )
        path = section.path.expanduser()
        if path.is_dir():
            for name in _NAMES[split]:
                if (path / f"{name}.bin").is_file():
                    found = open_tokens(path / f"{name}.bin", section.dtype)
                    return found.tokens, str(found.path)
            raise UserError(f"There is no file {path / _NAMES[split][0]}.bin.")
        found = open_tokens(path, section.dtype)
        num_held = int(section.held_out * len(found.tokens))
        cuts = {"train": (0, -2 * num_held), "valid": (-2 * num_held, -num_held), "test": (-num_held, None)}
        begin, end = cuts[split] if num_held else (0, 0)
        return found.tokens[begin:end], f"{found.path} ({split})"
