"""The text that BERT's rows are made of: tokens, sentences and documents of one split, from a folder or random."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from podium.contract import Split
from podium.data.text.folder import TextFolder
from podium.errors import UserError
from podium.machine import counter_rng

SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}

#: random text: enough for rows to differ, yet small compared with a model
_RANDOM_TOKENS, _RANDOM_DOCUMENT, _RANDOM_SENTENCE = 1 << 18, 1 << 11, (8, 40)


@dataclass(frozen=True)
class Corpus:
    """Sentence s is `tokens[sentences[s] : sentences[s + 1]]`; document d has sentences documents[d] … [d + 1] - 1."""

    tokens: NDArray
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    vocabulary: int
    special: dict[str, int]

    @cached_property
    def document_tokens(self) -> NDArray[np.int64]:
        """Return the offset of the first token of each document, and the end of the last."""
        return self.sentences[self.documents]

    @cached_property
    def inner_sentences(self) -> NDArray[np.int64]:
        """Return where sentences begin that follow another one of their document, in ascending order."""
        return np.setdiff1d(self.sentences, self.document_tokens)

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """Return all tokens of the vocabulary except the special ones."""
        return np.setdiff1d(np.arange(self.vocabulary), list(self.special.values()))


def open_corpus(text: TextFolder, split: Split) -> Corpus:
    """Open one split of a folder of text; tokens stay on disk until they are used."""
    if not text.special.keys() >= SPECIAL.keys():
        raise UserError(
            f"{text.path} holds {text.tokenizer_kind} tokens, but bert needs wordpiece ones: "
            "`podium data make text tokenizer=wordpiece out=FOLDER` makes them"
        )
    tokens, sentences, documents = text.tokens(split), text.sentences(split), text.documents(split)
    if not (_divides(sentences, len(tokens)) and _divides(documents, len(sentences) - 1)):
        raise UserError(f"the {split} split in {text.path} is damaged: make the text again")
    corpus = Corpus(tokens, sentences, documents, text.vocabulary, text.special)
    if np.count_nonzero(np.diff(corpus.document_tokens)) < 2:
        raise UserError(
            f"the {split} split in {text.path} has fewer than two documents, but bert pairs sentences of different "
            "documents: make the text from more files"
        )
    return corpus


def _divides(offsets: NDArray, total: int) -> bool:
    """Return whether these are offsets from 0 to `total` that never decrease."""
    return bool(offsets[0] == 0 and offsets[-1] == total and (np.diff(offsets) >= 0).all())


def random_corpus(vocabulary: int, seed: int, split: Split) -> Corpus:
    """Return random tokens, in sentences of random length and documents of equal length."""
    low, high = _RANDOM_SENTENCE
    uniform = counter_rng.uniforms(counter_rng.key("text", seed, split), np.arange(1), 2 * _RANDOM_TOKENS)[0]
    tokens = len(SPECIAL) + (uniform[:_RANDOM_TOKENS] * (vocabulary - len(SPECIAL))).astype(np.int64)
    lengths = low + (uniform[_RANDOM_TOKENS:] * (high - low + 1)).astype(np.int64)
    begins = np.cumsum(lengths)
    edges = np.arange(0, _RANDOM_TOKENS + 1, _RANDOM_DOCUMENT)  # a document also ends a sentence
    sentences = np.union1d(begins[begins < _RANDOM_TOKENS], edges).astype(np.int64)
    documents = np.searchsorted(sentences, edges).astype(np.int64)
    return Corpus(tokens.astype(np.uint32), sentences, documents, vocabulary, dict(SPECIAL))
