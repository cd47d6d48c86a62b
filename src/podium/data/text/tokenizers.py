"""Trains tokenizers on text with the library `tokenizers`; the same text gives the same tokenizer to the byte.

wordpiece   words and pieces of words (##ing), normalised as BERT does; unknown characters become [UNK]
bpe         pieces of bytes, as GPT-2's: any text can be encoded and decoded again
char        one token for each character; those not in the training text become <unk>
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from podium.errors import UserError

Kind = Literal["wordpiece", "bpe", "char"]
#: in the order of their numbers, from 0
SPECIAL_TOKENS: dict[Kind, tuple[str, ...]] = {
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "bpe": ("<|endoftext|>",),
    "char": ("<|endoftext|>", "<unk>"),
}
#: the token that ends a document; None: there is none
END_OF_DOCUMENT: dict[Kind, str | None] = {"wordpiece": None, "bpe": "<|endoftext|>", "char": "<|endoftext|>"}
#: wordpiece knows this many characters, the most frequent ones: each takes two places in the vocabulary
_WORDPIECE_ALPHABET = 500
_BYTES = 256

#: returns the sentences of the training text, document by document, from the beginning at every call
Texts = Callable[[], Iterable[list[str]]]


def train_tokenizer(kind: Kind, texts: Texts, vocabulary: int | None, lowercase: bool) -> Tokenizer:
    """Train a tokenizer of at most `vocabulary` tokens, special ones included; None: for char, every character."""
    if kind == "char":
        return _train_char(texts, vocabulary)
    assert vocabulary is not None
    return _train_bpe(texts, vocabulary) if kind == "bpe" else _train_wordpiece(texts, vocabulary, lowercase)


def _train_char(texts: Texts, vocabulary: int | None) -> Tokenizer:
    special = SPECIAL_TOKENS["char"]
    kept = _most_frequent(_characters(texts()), None if vocabulary is None else max(0, vocabulary - len(special)))
    tokens = {token: number for number, token in enumerate([*special, *kept])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _train_bpe(texts: Texts, vocabulary: int) -> Tokenizer:
    special = SPECIAL_TOKENS["bpe"]
    _check_room(vocabulary, _BYTES + len(special), "one for each of the 256 bytes and one to end a document")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _train_wordpiece(texts: Texts, vocabulary: int, lowercase: bool) -> Tokenizer:
    special = SPECIAL_TOKENS["wordpiece"]
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)

    counts = _characters([normalizer.normalize_str(sentence) for sentence in sentences] for sentences in texts())
    counts = Counter({character: count for character, count in counts.items() if not character.isspace()})
    kept = _most_frequent(counts, _WORDPIECE_ALPHABET)
    pieces = [f"##{character}" for character in kept]
    _check_room(vocabulary, len(special) + len(kept) + len(pieces), "two for each character of the text")
    # The library numbers continued characters in an order that changes from run to run, and with it which of two
    # equally frequent pairs is joined first. As special tokens, of a tokenizer used for training only, they have a
    # fixed order.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=[*special, *kept, *pieces], show_progress=False
    )
    learning = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    others = "[^\\s" + "".join(f"\\x{{{ord(character):x}}}" for character in kept) + "]"
    learning.normalizer = normalizers.Sequence([normalizer, normalizers.Replace(Regex(others), " ")])
    learning.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learning.train_from_iterator(texts(), trainer)
    tokenizer = Tokenizer(models.WordPiece(learning.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _characters(texts: Iterable[list[str]]) -> Counter[str]:
    """Count how often each character occurs."""
    counts: Counter[str] = Counter()
    for sentences in texts:
        counts.update("".join(sentences))
    return counts


def _most_frequent(counts: Counter[str], limit: int | None) -> list[str]:
    """Return the most frequent characters, sorted; of equally frequent ones the first."""
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    return sorted(ranked[:limit])


def _check_room(vocabulary: int, least: int, why: str) -> None:
    if vocabulary < least:
        raise UserError(f"`vocabulary` is {vocabulary:,}, but this text needs at least {least:,} tokens, {why}")
