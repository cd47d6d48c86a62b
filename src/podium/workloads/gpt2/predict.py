"""The report on a language model: how well it predicts, where it is surprised, what it writes.

The model's outputs are a probability for every token of the vocabulary at every position: too much to collect over a
split, so the losses are computed here, window by window.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import NDArray

from podium.contract import Picture, Prediction
from podium.data.source import Source, empty_buffers
from podium.ui import figures
from podium.ui.table import Table
from podium.workloads.gpt2.generate import generate
from podium.workloads.gpt2.model import Gpt2
from podium.workloads.gpt2.section import SampleSection

if TYPE_CHECKING:  # imports a compiled library
    from tokenizers import Tokenizer

#: More tokens would make no visible difference.
_MAX_TOKENS = 65_536
#: Number of logits held at a time.
_MAX_LOGITS = 1 << 23
_COLUMNS, _LINES = 96, 30
_FONT_SIZE = 8.5
_FONT_WIDTH = 0.602  # of DejaVu Sans Mono, relative to its size
_MOST_SURPRISED = 8.0
_HEAT = LinearSegmentedColormap.from_list("heat", ["#ffffff", "#fde9e3", "#f5ab96", figures.SECOND])
#: Characters for which the font has no glyph.
_UNDRAWN = "□"


def predict(
    model: Gpt2,
    source: Source,
    tokenizer: "Tokenizer | None",
    end: int | None,
    sample: SampleSection,
    folder: Path,
) -> Prediction:
    """Return pictures and tables; write sampled text to `samples.txt`. Without a tokenizer, show tokens as numbers."""
    windows, losses, right = _test_losses(model, source)
    loss = float(losses.mean())
    rows = [
        ["tokens", f"{losses.size:,}"],
        ["loss", f"{loss:.4f}"],
        ["perplexity", f"{math.exp(min(loss, 700.0)):,.2f}"],
        ["accuracy", f"{100 * right.mean():.2f} %"],
    ]
    if tokenizer is not None:
        num_bytes = len("".join(tokenizer.decode_batch(windows[:, 1:].tolist())).encode())
        rows.append(["bits per byte", f"{losses.sum() / math.log(2) / max(1, num_bytes):.3f}"])
    texts = _sampled(model, tokenizer, end, sample)
    file = folder / "samples.txt"
    folder.mkdir(parents=True, exist_ok=True)
    rule = "\n" + "-" * 80 + "\n"
    file.write_text(rule.join(text.rstrip("\n") for text in texts) + "\n", encoding="utf-8")
    how = f"Temperature {sample.temperature:g}, seed {sample.seed}" + (f", top {sample.top_k}" if sample.top_k else "")
    with figures.style():
        pictures = [
            Picture(
                "Loss by position",
                _draw_places(losses, folder / "places.png"),
                "Mean loss of a token by the number of tokens before it: how much the context helps.",
            ),
            Picture(
                "Where the model is surprised",
                _draw_surprise(_pieces(tokenizer, windows[0]), losses[0], folder / "surprise.png"),
                f"The first test text; the darker, the less expected (white: certain, darkest: a loss of "
                f"{_MOST_SURPRISED:g} or more).",
            ),
        ]
    return Prediction(
        pictures,
        [
            Table("Test split", ["", ""], rows, "Perplexity is exp(loss): as if choosing among that many tokens."),
            Table("Sampled text", ["text"], [[text] for text in texts], f"{how}; also in pictures/{file.name}."),
        ],
    )


def _test_losses(model: Gpt2, source: Source) -> tuple[NDArray, NDArray, NDArray]:
    """Return (windows, loss of every predicted token, whether it was the most likely one)."""
    (size,) = source.fields["tokens"].shape
    num_windows = min(len(source), max(1, _MAX_TOKENS // size))
    buffers = empty_buffers(source.fields, num_windows)
    source.gather(np.arange(num_windows), buffers)
    windows = torch.from_numpy(buffers["tokens"]).to(next(model.parameters()).device)
    at_once = max(1, _MAX_LOGITS // (size * model.vocabulary))
    losses, right = [], []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for part in windows.split(at_once):
                tokens = part.long()
                shape, target = tokens[:, 1:].shape, tokens[:, 1:].reshape(-1)
                logits = model(tokens[:, :-1]).float().flatten(0, 1)
                losses.append(F.cross_entropy(logits, target, reduction="none").view(shape).cpu().numpy().copy())
                right.append((logits.argmax(dim=1) == target).view(shape).cpu().numpy().copy())
                del logits  # not while the next ones are computed
    finally:
        model.train(was_training)
    return buffers["tokens"], np.concatenate(losses).astype(np.float64), np.concatenate(right)


def _sampled(model: Gpt2, tokenizer: "Tokenizer | None", end: int | None, sample: SampleSection) -> list[str]:
    prompt = [] if tokenizer is None else tokenizer.encode(sample.prompt, add_special_tokens=False).ids
    # A document starts after the token that ends the previous one.
    prompt = prompt[-model.section.context :] or [end or 0]
    written = generate(
        model,
        prompt,
        num_texts=sample.texts,
        num_tokens=sample.tokens,
        temperature=sample.temperature,
        top_k=sample.top_k,
        seed=sample.seed,
        end=end,
    )
    if tokenizer is None:
        return [" ".join(map(str, tokens)) for tokens in written]
    return [tokenizer.decode(prompt + tokens, skip_special_tokens=True) for tokens in written]


def _pieces(tokenizer: "Tokenizer | None", window: NDArray) -> list[str]:
    """Return the text of every predicted token."""
    if tokenizer is None:
        return [f"{token} " for token in window[1:]]
    return tokenizer.decode_batch([[token] for token in window[1:].tolist()], skip_special_tokens=False)


def _draw_places(losses: NDArray, path: Path) -> Path:
    """Draw means over increasingly long stretches, as later positions differ less from one another."""
    means = losses.mean(axis=0)
    edges = np.unique(np.geomspace(1, len(means) + 1, 25).astype(int)) - 1
    stretches = list(pairwise(edges))
    fig = figures.figure(9, 3.6)
    axes = fig.subplots()
    places = [math.sqrt((first + 1) * last) for first, last in stretches]
    axes.plot(places, [means[a:b].mean() for a, b in stretches], color=figures.ACCENT, marker="o", markersize=3.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(f"Loss by position: {losses.mean():.3f} on average")
    axes.set_xlabel("position in the window")
    axes.set_ylabel("loss")
    return figures.save(fig, path)


def _draw_surprise(pieces: list[str], losses: NDArray, path: Path) -> Path:
    """Draw the text on a grid of characters, each token on a background of its colour."""
    ground = np.ones((_LINES, _COLUMNS, 3))
    drawn: list[tuple[int, int, str]] = []
    line = column = 0
    for piece, loss in zip(pieces, losses, strict=True):
        colour = _HEAT(min(1.0, float(loss) / _MOST_SURPRISED))[:3]
        for character in piece.expandtabs(4):
            if column == _COLUMNS:
                line, column = line + 1, 0
            if line == _LINES:
                break
            ground[line, column] = colour
            shown = "↵" if character == "\n" else character
            if not shown.isspace():
                drawable = shown.isprintable() and ord(shown) < 0x3000
                drawn.append((line, column, shown if drawable else _UNDRAWN))
            line, column = (line + 1, 0) if character == "\n" else (line, column + 1)
    num_lines = min(_LINES, line + 1)
    width, height = _COLUMNS * _FONT_WIDTH * _FONT_SIZE / 72, num_lines * 1.45 * _FONT_SIZE / 72
    fig = figures.figure(width + 0.4, height + 0.4)
    fig.set_layout_engine("none")
    axes = fig.add_axes((0.2 / (width + 0.4), 0.2 / (height + 0.4), width / (width + 0.4), height / (height + 0.4)))
    axes.imshow(ground[:num_lines], aspect="auto", interpolation="nearest", extent=(0, _COLUMNS, num_lines, 0))
    axes.set_axis_off()
    axes.grid(False)
    for row, text in _runs(drawn).items():
        for begin, shown in text:
            axes.text(
                begin,
                row + 0.52,
                shown,
                family="DejaVu Sans Mono",
                fontsize=_FONT_SIZE,
                color=figures.INK,
                va="center_baseline",
                parse_math=False,
            )
    return figures.save(fig, path)


def _runs(drawn: list[tuple[int, int, str]]) -> dict[int, list[tuple[int, str]]]:
    """Join adjacent characters, by line: (column, text)."""
    lines: dict[int, list[tuple[int, str]]] = {}
    for line, column, character in drawn:
        runs = lines.setdefault(line, [])
        if runs and runs[-1][0] + len(runs[-1][1]) == column:
            runs[-1] = (runs[-1][0], runs[-1][1] + character)
        else:
            runs.append((column, character))
    return lines
