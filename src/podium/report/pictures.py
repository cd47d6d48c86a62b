"""The workload's pictures and tables as a run keeps them, embedded in a page: whole for one run, small beside others.

`pictures/prediction.json` may come from anybody: only files beside it are read, and of these only
PNGs that can be decoded to the last pixel are shown.
"""

import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from podium.machine.bounded_files import read_limited, read_mapping
from podium.report.reading import RunFacts
from podium.ui.page import embedded_image
from podium.ui.table import Table
from podium.ui.visible import visible, visible_lines

_MAX_BYTES, _MAX_PIXELS, _MAX_PICTURES = 32 << 20, 64_000_000, 64
#: of all pictures of a page with several runs, before they are written as text
_BUDGET = 700_000
_WIDTHS, _MAX_RUNS = (720, 480, 360), 9
#: what Pillow raises for a damaged PNG: at its header, in its pixels, or in the chunks after them
_DAMAGE = (OSError, ValueError, SyntaxError, IndexError, TypeError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Shown:
    """A picture of one run, ready for the page."""

    run: str
    source: str
    caption: str = ""


def predictions_of(facts: RunFacts) -> tuple[list[tuple[str, Shown]], list[Table]]:
    """Return the pictures of a run with their titles, and its tables."""
    pictures, tables = _listed(facts)
    found = []
    for title, caption, path in pictures:
        if (data := _png(path)) is not None:
            found.append((title, Shown(facts.name, embedded_image(data), caption)))
    return found, tables


def side_by_side(runs: Sequence[RunFacts]) -> tuple[dict[str, list[Shown]], int]:
    """Return by title the pictures of as many runs as there is room for, small, and the number of these runs."""
    found: dict[str, list[Shown]] = {}
    left, num_shown = _BUDGET, 0
    width = next((width for width, most in zip(_WIDTHS, (4, 10), strict=False) if len(runs) <= most), _WIDTHS[-1])
    for facts in runs[:_MAX_RUNS]:
        small = []
        for title, caption, path in _listed(facts)[0]:
            if (data := _small(path, width)) is not None:
                small.append((title, caption, data))
        size = sum(len(data) for *_, data in small)
        if not small or size > left:
            continue
        left, num_shown = left - size, num_shown + 1
        for title, caption, data in small:
            found.setdefault(title, []).append(Shown(facts.name, embedded_image(data, "webp"), caption))
    return found, num_shown


def _listed(facts: RunFacts) -> tuple[list[tuple[str, str, Path]], list[Table]]:
    """Return title, caption and file of each picture, and the tables; what is no such thing is left out."""
    folder = facts.run.pictures
    listed = read_mapping(folder / "prediction.json", "move it away, and `podium predict` writes it again") or {}
    pictures = [
        (visible(str(one["title"])), visible_lines(str(one.get("caption", ""))), folder / one["path"])
        for one in _mappings(listed.get("pictures"))
        if isinstance(one.get("path"), str) and "title" in one and one["path"] == Path(one["path"]).name
    ]
    tables = [
        Table(
            visible(str(one.get("title", ""))),
            [visible(str(cell)) for cell in one["columns"]],
            [[visible_lines(str(cell)) for cell in row] for row in one["rows"] if isinstance(row, list)],
            visible_lines(str(one.get("caption", ""))),
        )
        for one in _mappings(listed.get("tables"))
        if isinstance(one.get("columns"), list) and isinstance(one.get("rows"), list)
    ]
    return pictures[:_MAX_PICTURES], tables


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _png(path: Path) -> bytes | None:
    """Return the bytes of a picture; None where there is no PNG that can be shown."""
    return _decoded(path, lambda data, image: data)


def _small(path: Path, width: int) -> bytes | None:
    """Return a picture on white paper as WebP, no wider than that; None where there is no PNG that can be shown."""
    return _decoded(path, lambda data, image: _scaled(image, width))


def _decoded(path: Path, use: Callable[[bytes, Image.Image], bytes]) -> bytes | None:
    """Return what `use` makes of a picture's bytes and pixels; None where not all of it can be decoded."""
    try:
        data = read_limited(path, _MAX_BYTES)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            image.load()
            return use(data, image)
    except _DAMAGE:
        return None


def _scaled(image: Image.Image, width: int) -> bytes:
    small = image.convert("RGBA")
    paper = Image.new("RGBA", small.size, "white")
    paper.alpha_composite(small)
    flat = paper.convert("RGB")
    if flat.width > width:
        flat = flat.resize((width, max(1, round(flat.height * width / flat.width))), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    flat.save(written, "WEBP", quality=72, method=4)
    return written.getvalue()
