"""A disk that is full, for real (a small tmpfs): one sentence, nothing half-written, and on after making room."""

import shutil
import subprocess
from contextlib import suppress

import pytest

from podium.checkpoints import reading
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.train import train
from tests.support.processes import assert_user_error, podium_here, run_files, sentence
from tests.support.recipes import TINY

PAGE = 4096
#: what a run writes, in the order it is written
WRITTEN = {"environment.json", "recipe.yaml", "summary.json", "metrics.jsonl", "tensorboard", "checkpoints"}
SAVING = [*TINY["mnist"], "train.length=20up", "checkpoint.every=5up", "checkpoint.keep=9", "valid.every=0"]


class Disk:
    """A mounted file system of a size that can be changed."""

    def __init__(self, path):
        self.path = path
        self._filler = path / "filler"

    def mount(self, size: int) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "podium-test", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)

    def leave_room(self, num_bytes: int) -> None:
        """Fills the disk up to so many bytes."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(16 * PAGE)):
                pass
        with self._filler.open("rb+") as file:
            file.truncate(self._filler.stat().st_size // PAGE * PAGE - num_bytes)

    def make_room(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    found = Disk(place)
    try:
        mounted = found.mount(64 * 2**20)
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield found
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Run:
    """The same training with room enough."""
    return train(load_recipe(SAVING[0], SAVING[1:]), tmp_path_factory.mktemp("straight") / "run")


def size_of(folder) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())


def test_no_room_for_a_checkpoint_keeps_the_earlier_one_which_resumes_after_making_room(disk, straight):
    one = size_of(reading.checkpoint_paths(straight.checkpoints)[0])
    disk.resize(int(2.5 * one) + 16 * PAGE)
    run = Run(disk.path / "run")
    done = podium_here("train", *SAVING, "--out", run.path)
    assert_user_error(
        done, "the checkpoint of update 15 could not be written", "the disk is full", "earlier checkpoints"
    )
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["update-00000005", "update-00000010"]
    assert run.summary()["state"] == "failed"

    disk.resize(64 * 2**20)
    resumed = podium_here("resume", run.path)
    assert resumed.returncode == 0, resumed.stderr
    assert "after update 10 of 20" in resumed.stderr
    assert run.summary()["state"] == "done"
    assert run.summary()["weights_sha256"] == straight.summary()["weights_sha256"]
    assert [record["update"] for record in run.records()] == [5, 10, 15, 20]


def test_no_room_for_the_run_folder_leaves_nothing(disk):
    disk.leave_room(0)
    done = podium_here("train", *SAVING, "--out", disk.path / "run")
    assert_user_error(done, "the disk is full")
    assert run_files(disk.path) == ["filler"]


@pytest.mark.slow
def test_wherever_the_room_ends_only_checkpoints_end_a_run_and_a_resume_completes(disk):
    """Every page more of room comes to its end at another write: recipe, summary, records, TensorBoard, checkpoint."""
    args = [*SAVING, "log.tensorboard=true", "train.length=10up"]
    told = set()
    for pages in range(8):
        run = Run(disk.path / f"run{pages}")
        disk.leave_room(pages * PAGE)
        done = podium_here("train", *args, "--out", run.path)
        assert_user_error(done, "the disk is full")
        ended_by = {name for name in WRITTEN if f"{run.path / name}" in sentence(done.stderr)}
        assert ended_by <= {"environment.json", "recipe.yaml", "checkpoints"}
        told |= {name for name in WRITTEN if f"{run.path / name}" in done.stderr}
        for sink in ("metrics.jsonl", "TensorBoard"):
            assert done.stderr.count(f"the run goes on without records for {sink}") <= 1
        assert not [name for name in run_files(run.path) if ".writing" in name]
        disk.make_room()
        if run.recipe_file.exists():
            resumed = podium_here("resume", run.path)
            assert resumed.returncode == 0, resumed.stderr
            assert run.summary()["state"] == "done"
        else:
            assert run_files(run.path) == []
    assert told == WRITTEN


def test_a_full_disk_of_records_and_logs_ends_no_run_while_checkpoints_have_room(disk, tmp_path):
    """The run folder is on the full disk, its checkpoints are a link to another one."""
    run = Run(disk.path / "run")
    assert podium_here("train", *SAVING, "train.length=5up", "--out", run.path).returncode == 0
    shutil.copytree(run.checkpoints, tmp_path / "checkpoints")
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(tmp_path / "checkpoints")
    run.recipe_file.write_text(run.recipe_file.read_text().replace("length: 5up", "length: 20up"))
    disk.leave_room(0)
    done = podium_here("resume", run.path, "--accept-changes")
    assert_user_error(done, "summary.json cannot be written", "all updates are saved", "`podium resume")
    assert "the run goes on without records for metrics.jsonl" in done.stderr
    found = reading.load_latest(run.checkpoints, pytest.fail)
    assert found.update == 20
    disk.make_room()
    assert podium_here("resume", run.path).returncode == 0
    assert (run.summary()["state"], run.summary()["updates"]) == ("done", 20)


@pytest.mark.slow
def test_no_room_for_pictures_and_report_leaves_a_complete_run(disk):
    args = [*SAVING, "log.report=true", "train.length=10up"]
    assert podium_here("train", *args, "--out", disk.path / "whole").returncode == 0
    needed, report = size_of(disk.path / "whole"), (disk.path / "whole" / "report.html").stat().st_size
    for name, missing in (("pictures", report // PAGE * PAGE + 8 * PAGE), ("report.html", 4 * PAGE)):
        run = Run(disk.path / f"without-{name}")
        disk.leave_room(needed - missing)
        done = podium_here("train", *args, "--out", run.path)
        assert done.returncode == 0, done.stderr
        assert f"{name} cannot be written: the disk is full; the run is complete" in done.stderr
        disk.make_room()
        assert run.summary()["state"] == "done"
    predicted = podium_here("predict", run.path)
    assert predicted.returncode == 0, predicted.stderr
    assert run.report_file.exists()
