"""The report on BERT's pretraining: masks filled in, quality of the guesses, accuracy for rare and frequent words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.contract import Picture, Prediction
from podium.ui import figures
from podium.ui.table import Table

MAX_ROWS = 1000
_NUM_BEST = 100
_NUM_SHOWN = 3
_NUM_EXAMPLES = 12
#: tokens shown to the left and right of a mask
_CONTEXT = 9
_NUM_BINS = 8
_MASK = "[MASK]"


def best_words(output: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Reduce the model's output to the most likely words for every mask and the more likely answer for every pair.

    The logits of a whole split would not fit into memory.
    """
    words, pairs = output
    probability, token = words.softmax(-1).topk(min(_NUM_BEST, words.shape[-1]), dim=-1)
    return {"probability": probability, "token": token.to(torch.int32), "pair": pairs.argmax(-1)}


def predict(
    given: Mapping[str, NDArray], got: Mapping[str, NDArray], tokenizer: Any | None, folder: Path
) -> Prediction:
    """Return pictures and tables of rows (`given`, see text_rows.py) and the best words for their masks (`got`)."""
    used = given["target"] >= 0
    target = given["target"][used]
    hit = got["token"][used] == target[:, None]
    # The rank of the true word among the guesses; one past the last if it is not among them.
    place = np.where(hit.any(axis=1), hit.argmax(axis=1), hit.shape[1])
    pairs = given["follows"] >= 0
    pair_accuracy = float((got["pair"][pairs] == given["follows"][pairs]).mean())
    first = 100 * float((place == 0).mean())
    of = f"{len(target):,} masked words of the test text"
    with figures.style():
        pictures = [
            Picture(
                "The true word among the guesses",
                _draw_places(place, hit.shape[1], folder / "guesses.png"),
                f"{of}: for {first:.1f} % the first guess is correct.",
            ),
            Picture(
                "Frequent and rare words",
                _draw_frequency(target, place == 0, folder / "frequency.png"),
                f"{of}, in groups of equal size by how often each word is masked.",
            ),
        ]
    return Prediction(
        pictures,
        [_examples(given, got, used, tokenizer), _summary(place, pair_accuracy, int(pairs.sum()))],
    )


def _summary(place: NDArray, pair_accuracy: float, num_pairs: int) -> Table:
    rows = [[f"among the best {most}" if most > 1 else "best guess", _percent((place < most).mean())]
            for most in (1, 3, 10)]  # fmt: skip
    rows.append(["next sentence or not", _percent(pair_accuracy)])
    note = f"{len(place):,} masked words and {num_pairs:,} pairs of the test text."
    return Table("How often the answer is correct", ["answer", "correct"], rows, note)


def _examples(given: Mapping[str, NDArray], got: Mapping[str, NDArray], used: NDArray, tokenizer: Any | None) -> Table:
    """Show one mask from each of several rows: the text around it, the true word, and the most likely ones."""
    mask = tokenizer.token_to_id(_MASK) if tokenizer is not None else None
    rows = []
    for row in np.linspace(0, len(used) - 1, min(_NUM_EXAMPLES, len(used))).astype(int):
        shown = given["tokens"][row][given["masked"][row]]
        hidden = used[row] & (shown == mask) if mask is not None else used[row]
        if not hidden.any():
            continue
        slot = int(np.flatnonzero(hidden)[hidden.sum() // 2])
        names = _words(tokenizer, [int(given["target"][row, slot]), *got["token"][row, slot, :_NUM_SHOWN].tolist()])
        shares = got["probability"][row, slot, :_NUM_SHOWN]
        guesses = ", ".join(f"{name} {_percent(share)}" for name, share in zip(names[1:], shares, strict=True))
        rows.append([_around(given, row, slot, tokenizer), names[0], guesses])
    note = f"From the test text; ▁▁▁ is the word to predict, … other masks. The {_NUM_SHOWN} most likely words."
    return Table("Masks filled in", ["text", "true word", "guesses"], rows, note)


def _around(given: Mapping[str, NDArray], row: int, slot: int, tokenizer: Any | None) -> str:
    """Return the text on both sides of a mask, within its part of the sequence."""
    tokens, place = given["tokens"][row], int(given["masked"][row, slot])
    part = given["sequence"][row].astype(int) * 2 + given["segment"][row]
    inside = np.flatnonzero(part == part[place])
    low, high = max(place - _CONTEXT, int(inside[0])), min(place + _CONTEXT, int(inside[-1]))
    before, after = tokens[low:place].tolist(), tokens[place + 1 : high + 1].tolist()
    return f"{_text(tokenizer, before)} ▁▁▁ {_text(tokenizer, after)}".strip()


def _text(tokenizer: Any | None, tokens: Sequence[int]) -> str:
    """Return the words of tokens, with pieces joined and without special tokens other than masks."""
    words: list[str] = []
    for name in _words(tokenizer, tokens):
        if name in ("[CLS]", "[SEP]", "[PAD]"):
            continue
        if name.startswith("##") and words:
            words[-1] += name[2:]
        else:
            words.append("…" if name == _MASK else name)
    return " ".join(words)


def _words(tokenizer: Any | None, tokens: Sequence[int]) -> list[str]:
    if tokenizer is None:
        return [str(token) for token in tokens]
    return [tokenizer.id_to_token(token) or str(token) for token in tokens]


def _draw_places(place: NDArray, num_best: int, path: Path) -> Path:
    most = np.arange(1, num_best + 1)
    share = 100 * np.searchsorted(np.sort(place), most) / len(place)
    fig = figures.figure(8.0, 4.2)
    axes = fig.subplots()
    axes.plot(most, share, color=figures.ACCENT, linewidth=2)
    axes.fill_between(most, share, color=figures.ACCENT, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 3, 10, 30, 100) if tick <= num_best]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    for tick in ticks:
        value = share[tick - 1]
        axes.plot(tick, value, "o", color=figures.ACCENT, markersize=5, clip_on=False)
        axes.annotate(
            f"{value:.0f} %", (tick, value), xytext=(0, 8), textcoords="offset points", ha="center", color=figures.INK
        )
    axes.set(xlim=(0.9, 1.1 * num_best), ylim=(0, min(100, max(1.0, 1.18 * share.max()))))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("number of guesses")
    axes.set_title("Masks whose true word is among the best guesses", pad=12)
    return figures.save(fig, path)


def _draw_frequency(target: NDArray, right: NDArray, path: Path) -> Path:
    """Draw the accuracy for groups of masks of about equal size, from rare words to frequent ones."""
    _, word, count = np.unique(target, return_inverse=True, return_counts=True)
    order = np.argsort(count[word], kind="stable")
    groups = [group for group in np.array_split(order, _NUM_BINS) if len(group)]
    accuracy = [100 * float(right[group].mean()) for group in groups]
    names = [_span(int(count[word[group[0]]]), int(count[word[group[-1]]])) for group in groups]
    fig = figures.figure(8.0, 4.2)
    axes = fig.subplots()
    bars = axes.bar(range(len(groups)), accuracy, color=figures.ACCENT, width=0.72)
    axes.bar_label(bars, [f"{value:.0f} %" for value in accuracy], padding=3, color=figures.INK, fontsize=9)
    axes.set_xticks(range(len(groups)), names)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, min(100, max(1.0, 1.18 * max(accuracy))))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("how often the word is masked in this text")
    axes.set_title("Words predicted correctly, from rare to frequent", pad=12)
    return figures.save(fig, path)


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} – {high:,}"


def _percent(share: float) -> str:
    """Format a share with few digits, but never round it to 0 or 100 %."""
    percent = 100 * float(share)
    if 0 < percent < 0.1:
        return "<0.1 %"
    return ">99.9 %" if 99.9 < percent < 100 else f"{percent:.1f} %"
