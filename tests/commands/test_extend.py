"""`podium extend`: a longer training that goes on where a run ended."""

import pytest

from podium.runs.folder import Run
from tests.support.own import write_own
from tests.support.processes import assert_user_error, podium_here, run_files
from tests.support.recipes import TINY

RECIPE = [*TINY["neuron"], "batch.micro=4", "batch.replicas=2", "schedule.warmup=2up", "valid.every=3up"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extended")
    for name, length, schedule in (
        ("short", "6up", "constant"),
        ("long", "12up", "constant"),
        ("cosine", "6up", "cosine"),
    ):
        done = podium_here(
            "train", *RECIPE, f"schedule.name={schedule}", f"train.length={length}", "--out", folder / name
        )
        assert done.returncode == 0, done.stderr
    return folder


def test_an_extended_run_has_the_weights_and_records_of_one_that_was_long_from_the_start(folder):
    before = run_files(folder / "short"), Run(folder / "short").summary()
    done = podium_here("extend", folder / "short", "train.length=+6up", "--out", folder / "more")
    assert done.returncode == 0, done.stderr
    assert "as long from the start" in done.stderr
    assert "would have had" not in done.stderr
    more, long = Run(folder / "more"), Run(folder / "long")
    assert more.summary()["weights_sha256"] == long.summary()["weights_sha256"]
    assert more.summary()["recipe_sha256"] == long.summary()["recipe_sha256"]
    shown = [[(r["update"], r["train/loss"]) for r in run.records() if "valid/loss" in r] for run in (more, long)]
    assert shown[0] == shown[1]
    assert (run_files(folder / "short"), Run(folder / "short").summary()) == before


def test_lengths_add_up_in_any_unit_and_folders_are_numbered(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = podium_here("extend", "short", "train.length=+16sa")
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("short-*")
    assert Run(found).summary()["updates"] == 8


def test_a_schedule_that_depends_on_the_length_is_told(folder):
    done = podium_here("extend", folder / "cosine", "train.length=9up", "--out", folder / "cosine-more")
    assert done.returncode == 0, done.stderr
    assert "the cosine schedule depends on the length: from update" in done.stderr
    assert Run(folder / "cosine-more").summary()["updates"] == 9


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give the new length"),
        (["optim.lr=1"], "give the new length"),
        (["train.length=4up"], "ends at update 4"),
        (["train.length=+soon"], "is not a duration"),
        (["train.length=+1up", "--out", "short"], "already holds a run"),
    ],
)
def test_mistakes_make_no_folder(args, said, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = run_files(folder)
    assert_user_error(podium_here("extend", folder / "short", *args), said)
    assert run_files(folder) == before


@pytest.mark.slow
def test_the_code_of_the_run_goes_along(tmp_path):
    (tmp_path / "watcher.py").write_text("class Watcher:\n    def on_end(self, run, summary):\n        pass\n")
    recipe = write_own(tmp_path)
    observer = f"log.observers=[{tmp_path / 'watcher.py'}:Watcher]"
    done = podium_here("train", recipe, "--out", tmp_path / "short", "train.length=1ep", observer)
    assert done.returncode == 0, done.stderr
    done = podium_here("extend", tmp_path / "short", "train.length=2ep", "--out", tmp_path / "long")
    assert done.returncode == 0, done.stderr
    for copy in ("code/mine.py", "code/blocks.py", "code-observers/1/watcher.py"):
        assert (tmp_path / "long" / copy).read_bytes() == (tmp_path / "short" / copy).read_bytes()
