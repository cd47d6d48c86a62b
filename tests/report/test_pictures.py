"""Pictures of runs in pages: those that are damaged are left out, wherever the damage is, and all others stay."""

import io
import struct
import zlib

import pytest
from PIL import Image

from podium.report.pictures import predictions_of, side_by_side
from podium.report.reading import find_runs, read_runs
from tests.support.made_runs import make_run


def png(width: int = 900, height: int = 600) -> bytes:
    written = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).save(written, "PNG")
    return written.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def behind_pixels(kind: bytes, data: bytes) -> bytes:
    whole = png()
    return whole[:-12] + chunk(kind, data) + whole[-12:]


def broken_stream() -> bytes:
    whole = png()
    at = whole.index(b"IDAT") + 4
    return whole[:at] + b"\xff" * 40 + whole[at + 40 :]


DAMAGE = {
    "no picture": b"rubbish",
    "cut within the pixels": png()[:2000],
    "another stream": broken_stream(),
    "a short colour behind the pixels": behind_pixels(b"tRNS", b""),
    "a profile without an end": behind_pixels(b"iCCP", b"name"),
    "no pixels": png().replace(b"IDAT", b"iDAT"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_picture_is_left_out_and_its_run_is_not(tmp_path, kind):
    for name in ("a", "b"):
        make_run(tmp_path / name, picture="where it fires")
    (tmp_path / "a/pictures/picture.png").write_bytes(DAMAGE[kind])
    facts = read_runs(find_runs([tmp_path]), print)
    pictures, tables = predictions_of(facts[0])
    assert pictures == []
    assert len(tables) == 1
    assert [title for title, _ in predictions_of(facts[1])[0]] == ["where it fires"]
    shown, num_runs = side_by_side(facts)
    assert [picture.run for picture in shown["where it fires"]] == [facts[1].name]
    assert num_runs == 1


def test_a_picture_too_tall_for_small_ones_is_only_in_its_own_report(tmp_path):
    """WebP has at most 16,383 rows."""
    run = make_run(tmp_path / "a", picture="tall")
    (run / "pictures/picture.png").write_bytes(png(4, 20_000))
    (facts,) = read_runs(find_runs([run]), print)
    assert len(predictions_of(facts)[0]) == 1
    assert side_by_side([facts]) == ({}, 0)
