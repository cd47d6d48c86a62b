"""Tokens in files: windows, flat and indexed files, and what is said of bad ones."""

import struct

import numpy as np
import pytest

from podium.data.source import empty_buffers
from podium.data.text.token_windows import TokenWindows, open_tokens
from podium.errors import UserError
from tests.support.processes import podium_here

CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_indexed(folder, sequences, code=8, documents=None, **changes):
    """A pair of files, written by the published description and not by the code under test."""
    dtype = np.dtype(CODES.get(code, "<u2"))
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths)])[:-1] * dtype.itemsize
    documents = range(len(sequences) + 1) if documents is None else documents
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", changes.get("version", 1), code, len(lengths), len(documents))
    index = changes.get("head", head) + lengths.tobytes() + places.astype("<i8").tobytes()
    index += np.array(documents, "<i8").tobytes()
    (folder / "text.idx").write_bytes(index[: changes.get("cut")])
    (folder / "text.bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return folder / "text.bin"


def rows(source, samples):
    out = empty_buffers(source.fields, len(samples))
    source.gather(np.array(samples), out)
    return out["tokens"]


def test_windows_ask_for_every_token_but_the_first_once():
    tokens = np.arange(1, 26, dtype=np.uint16)
    source = TokenWindows(tokens, 8, 100, "here")
    assert len(source) == 3
    found = rows(source, [2, 0, 1])
    assert found.dtype == np.int32
    assert found.tolist() == [list(range(17, 26)), list(range(1, 10)), list(range(9, 18))]
    assert sorted(found[:, 1:].ravel()) == list(range(2, 26))


def test_windows_begin_at_multiples_of_the_stride():
    source = TokenWindows(np.arange(20, dtype=np.uint16), 8, 100, "here", stride=3)
    assert rows(source, range(len(source)))[:, 0].tolist() == [0, 3, 6, 9]
    assert len(TokenWindows(np.arange(9), 8, 100, "here", stride=3)) == 1


def test_too_few_tokens_for_a_window_are_told():
    with pytest.raises(UserError, match=r"here has 8 tokens, too few for one window of 9.*`workload.data.length` to 7"):
        TokenWindows(np.arange(8), 8, 100, "here")


@pytest.mark.parametrize(("token", "dtype"), [(100, np.uint16), (-1, np.int32), (70_000, np.uint32)])
def test_a_token_outside_of_the_vocabulary_is_told_and_not_used(token, dtype):
    tokens = np.array([1] * 9 + [token] * 9, dtype)
    source = TokenWindows(tokens, 8, 100, "here")
    rows(source, [0])
    with pytest.raises(UserError, match=rf"here holds the token {token}, but `workload.model.vocabulary` is 100"):
        rows(source, [1])


def test_a_flat_file_is_found_with_and_without_its_ending(tmp_path):
    np.arange(5, dtype="<u2").tofile(tmp_path / "a.bin")
    for name in ("a", "a.bin"):
        assert open_tokens(tmp_path / name).tokens.tolist() == [0, 1, 2, 3, 4]
    np.arange(5, dtype="<u4").tofile(tmp_path / "b.bin")
    assert open_tokens(tmp_path / "b.bin", "uint32").tokens.tolist() == [0, 1, 2, 3, 4]


def test_files_that_cannot_be_tokens_are_told(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"odd.bin has 3 bytes, which is not a whole number of uint16 tokens"):
        open_tokens(tmp_path / "odd.bin")
    with pytest.raises(UserError, match=r"no file of tokens .*none.bin"):
        open_tokens(tmp_path / "none")


@pytest.mark.parametrize("code", CODES)
def test_indexed_files_of_every_type_are_read(tmp_path, code):
    path = write_indexed(tmp_path, [[1, 2, 3], [4], [5, 6]], code, documents=[0, 2, 3])
    found = open_tokens(path)
    assert found.tokens.dtype == CODES[code]
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.sequences.tolist() == [0, 3, 4, 6]
    assert found.documents.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": b"NOINDEX\x00\x00" + bytes(25)}, "does not begin with MMIDIDX"),
        ({"version": 2}, "has version 2"),
        ({"code": 6}, "64-bit floating-point numbers, which cannot be tokens"),
        ({"code": 9}, "its tokens the unknown type 9"),
        ({"cut": 20}, "ends inside its header"),
        ({"cut": 40}, "is truncated: 2 sequences take"),
        ({"documents": [0, 1]}, "documents do not cover"),
    ],
)
def test_a_bad_index_is_told(tmp_path, changes, message):
    path = write_indexed(tmp_path, [[1, 2, 3], [4]], changes.pop("code", 8), **changes)
    with pytest.raises(UserError, match=message):
        open_tokens(path)


def test_info_says_what_an_index_tells_of(tmp_path):
    write_indexed(tmp_path, [[1, 2, 3], [4], [5, 6]], 8, documents=[0, 2, 3])
    done = podium_here("data", "info", tmp_path)
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[-2].strip("│").split("│")]
    assert cells == ["text.bin", "6", "3", "2", "uint16"]


def test_an_index_of_other_tokens_is_told(tmp_path):
    path = write_indexed(tmp_path, [[1, 2, 3], [4]])
    path.write_bytes(bytes(6))
    with pytest.raises(UserError, match=r"holds 3 tokens, but text.idx says 4"):
        open_tokens(path)
