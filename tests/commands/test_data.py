"""`podium data make`: what exists is replaced on request only, and then by whole files."""

import pytest

from tests.support.processes import assert_user_error, podium_here

MAKE = {
    "text": ["text", "input=book.txt", "tokenizer=char"],
    "neuron": ["neuron", "samples=10"],
    "cosmology": ["cosmology", "size=16", "valid_size=16"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("An owl sang. " * 50)
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", MAKE)
def test_existing_data_is_replaced_with_force_only(folder, what):
    first = podium_here("data", "make", *MAKE[what], "out=data")
    assert first.returncode == 0, first.stderr
    before = contents(folder / "data")
    changed = folder / "data" / max(before, key=lambda name: len(before[name]))
    changed.write_bytes(b"changed")

    refused = podium_here("data", "make", *MAKE[what], "out=data")
    assert_user_error(refused, "already exists", "`--force`")
    assert changed.read_bytes() == b"changed"

    forced = podium_here("data", "make", *MAKE[what], "out=data", "--force")
    assert forced.returncode == 0, forced.stderr
    assert contents(folder / "data").keys() == before.keys()
    assert changed.read_bytes() == before[changed.name]
    assert not list(folder.glob(".*"))  # nothing is left beside


def test_force_replaces_a_text_and_nothing_else(folder):
    (folder / "data").mkdir()
    (folder / "data" / "thesis.tex").write_text("years of work")
    assert_user_error(podium_here("data", "make", *MAKE["text"], "out=data", "--force"), "thesis.tex", "out=FOLDER")
    assert contents(folder / "data") == {"thesis.tex": b"years of work"}
    assert_user_error(podium_here("data", "make", *MAKE["text"], "out=book.txt", "--force"), "book.txt is a file")


def test_a_text_that_cannot_be_made_leaves_the_earlier_one(folder):
    assert podium_here("data", "make", *MAKE["text"], "out=data").returncode == 0
    before = contents(folder / "data")
    again = podium_here("data", "make", "text", "input=nowhere", "out=data", "--force")
    assert_user_error(again, "nowhere")
    assert contents(folder / "data") == before
