"""Pruning: old checkpoints go, but never the newest good ones or the best, whatever else lies in the folder."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from podium.checkpoints import pruning, reading, writing
from podium.checkpoints.pruning import Pruner
from podium.checkpoints.writing import Saver
from podium.contract import by_dimension
from podium.optim.optimisers import build_optimiser
from podium.recipe.sections.checkpoint import CheckpointSection
from podium.recipe.sections.optim import OptimSection

NEXT = 9


def small():
    model = nn.Linear(2, 2)
    return model, build_optimiser(OptimSection(name="sgd", lr=1e-2), model, by_dimension(model))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder with good checkpoints of updates 1 to 8."""
    folder = tmp_path_factory.mktemp("good")
    for update in range(1, NEXT):
        writing.save(folder, update, *small(), {})
    return folder


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("update-")) for path in reading.checkpoint_paths(folder)]


def flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def truncate(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("update")


def become_a_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent)


HARM = {
    "good": lambda path: None,
    "absent": shutil.rmtree,
    "flipped": flip,
    "truncated": truncate,
    "without manifest": lambda path: (path / "manifest.json").unlink(),
    "with another manifest": lambda path: (path / "manifest.json").write_text("[[1, 2"),
    "with a folder in it": lambda path: (path / "model").mkdir(),
    "empty": empty,
    "a file": become_a_file,
    "a link": become_a_link,
}
FOREIGN = ["update-notes", "update-00000002.bak", "update-99", ".writing-mine", "other"]


@settings(deadline=None, max_examples=60)
@given(
    harms=st.lists(st.sampled_from(sorted(HARM)), min_size=NEXT - 1, max_size=NEXT - 1),
    keep=st.integers(1, 4),
    best=st.one_of(st.none(), st.integers(1, NEXT)),
    foreign=st.lists(st.sampled_from(FOREIGN), unique=True),
)
def test_the_newest_good_ones_and_the_best_survive_any_mixture(good, harms, keep, best, foreign):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoints"
        shutil.copytree(good, folder)
        for update, harm in enumerate(harms, start=1):
            HARM[harm](folder / f"update-{update:08d}")
        for name in foreign:
            (folder / name).write_text("mine") if name.startswith(".") else (folder / name).mkdir()
        # A folder inside a checkpoint is read past: it is not damaged for `load`, but not counted either.
        was_good = [update for update, harm in enumerate(harms, start=1) if harm == "good"]
        best_exists = best is not None and (folder / f"update-{best:08d}").exists()
        with Saver(folder, CheckpointSection(keep=keep)) as saver:
            saver.save(NEXT, *small(), {}, best)
        left = reading.checkpoint_paths(folder)
        assert reading.load(folder / f"update-{NEXT:08d}").update == NEXT
        for update in [*was_good, NEXT][-keep:]:
            assert reading.load(folder / f"update-{update:08d}").update == update
        if best_exists and not (folder / f"update-{best:08d}").is_file():
            assert folder / f"update-{best:08d}" in left
        assert all((folder / name).exists() for name in foreign)
        if len(was_good) >= keep:  # nothing older stays but the best, links and what is not a checkpoint
            oldest = [*was_good, NEXT][-keep]
            older = [path for path in left if path.name[7:].isdecimal() and int(path.name[7:]) < oldest]
            assert {int(path.name[7:]) for path in older if not path.is_symlink()} - {99} <= {best}


def test_the_newest_and_the_best_are_kept(good, tmp_path):
    shutil.copytree(good, tmp_path / "checkpoints")
    Pruner(tmp_path / "checkpoints").prune(2, best_update=2)
    assert names(tmp_path / "checkpoints") == [2, 7, 8]


def test_nothing_is_removed_where_too_few_are_good(good, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(good, folder)
    for update in range(2, NEXT):
        flip(folder / f"update-{update:08d}")
    Pruner(folder).prune(2, best_update=None)
    assert names(folder) == list(range(1, NEXT))


def test_checkpoints_of_this_process_are_not_read_again_and_others_once(good, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(good, folder)
    for update in range(1, 7):
        shutil.rmtree(folder / f"update-{update:08d}")
    read = []
    has_checksum = pruning._has_checksum
    monkeypatch.setattr(
        pruning, "_has_checksum", lambda path, wanted: read.append(path.parent.name[-1]) or has_checksum(path, wanted)
    )
    with Saver(folder, CheckpointSection(keep=3)) as saver:
        for update in (9, 10, 11):
            saver.save(update, *small(), {}, None)
    assert sorted(set(read)) == ["7", "8"]
    assert len(read) == len(set(read)) * len(list((good / "update-00000008").iterdir())) - len(set(read))
    assert names(folder) == [9, 10, 11]


def test_one_of_this_process_that_is_cut_short_later_no_longer_counts(tmp_path):
    with Saver(tmp_path, CheckpointSection(keep=2)) as saver:
        for update in (1, 2, 3, 4):
            saver.save(update, *small(), {}, None)
            saver.wait()
            if update == 3:
                truncate(tmp_path / "update-00000003")
    assert names(tmp_path) == [2, 3, 4]
    assert torch.equal(reading.load(tmp_path / "update-00000002").weights["bias"], torch.zeros(2)) is False
