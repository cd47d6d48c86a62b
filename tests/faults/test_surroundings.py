"""A machine that gives a run less than it would like: no rights, read-only folders, full disks, others at work."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run, create_run
from tests.support.processes import DEADLINE_S, assert_user_error, podium_command, run_files, started
from tests.support.recipes import TINY

pytestmark = pytest.mark.slow

RECIPE = [*TINY["mnist"], "batch.replicas=2", "train.length=5up"]
NOBODY = 65534
#: may read everything, as the Python of the tests may lie in root's home, but write only what is its own
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
             "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]  # fmt: skip


def run(words: list[str], cwd: Path, under: list[str] | None = None, **env: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*(under or []), *podium_command(*words)],
        cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **{name: str(env[name]) for name in env}},
    )  # fmt: skip


@pytest.fixture
def home():
    """A folder of a user without rights, and beside it one of root's: (own, not writable)."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become somebody else, with the command `setpriv`")
    with tempfile.TemporaryDirectory(prefix="podium-test-") as folder:
        Path(folder).chmod(0o755)
        own, others = Path(folder, "own"), Path(folder, "others")
        own.mkdir()
        others.mkdir(mode=0o755)
        os.chown(own, NOBODY, NOBODY)
        if subprocess.run([*AS_NOBODY, "true"], capture_output=True).returncode:
            pytest.skip("this container lets nobody keep the right to read")
        yield own, others


@pytest.mark.parametrize("num_instances", [1, 2])
def test_a_user_without_rights_trains_to_the_same_weights(num_instances, home, weights_alone):
    own, _ = home
    words = ["train", *RECIPE, "--instances", str(num_instances), "--out", "run"]
    done = run(words, own, AS_NOBODY, PODIUM_CACHE=own / "cache", HOME=own)
    assert done.returncode == 0, done.stderr
    assert Run(own / "run").summary()["weights_sha256"] == weights_alone(RECIPE)
    assert (own / "run").stat().st_uid == NOBODY


def test_folders_that_cannot_be_written_are_one_sentence_or_not_needed(home):
    own, others = home
    done = run(["train", *RECIPE, "--out", str(others / "run")], own, AS_NOBODY, PODIUM_CACHE=own / "cache")
    assert_user_error(done, "run cannot be created: Permission denied")
    done = run(["train", *RECIPE], others, AS_NOBODY, PODIUM_CACHE=own / "cache")
    assert_user_error(done, "runs/mnist-001 cannot be created: Permission denied")
    # Nothing that this run needs has to be kept.
    done = run(["train", *RECIPE, "--out", "run"], own, AS_NOBODY, PODIUM_CACHE=others / "cache", HOME=others)
    assert done.returncode == 0, done.stderr
    for path in [own / "run", *(own / "run").rglob("*")]:
        os.chown(path, 0, 0)
    for words, part in ((["resume", "run"], ".lock cannot be written: Permission denied"),
                        (["predict", "run"], "pictures cannot be written: Permission denied"),
                        (["average", "run"], "average: Permission denied")):  # fmt: skip
        assert_user_error(run(words, own, AS_NOBODY, PODIUM_CACHE=own / "cache"), part)
    for words in (["validate", "run"], ["show", "run"]):  # these only read
        assert run(words, own, AS_NOBODY, PODIUM_CACHE=own / "cache").returncode == 0


def with_mounted(place: str, size: str) -> list[str]:
    """Words before a command that see a file system of this size at `place`; nobody else does."""
    mount = f'mount -t tmpfs -o size={size} podium-test "{place}" && exec "$@"'
    under = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*under, "true"], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    return under


def test_a_full_cache_disk_stops_only_who_needs_it(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    under = with_mounted(str(cache), "8k")
    done = run(["train", *RECIPE, "--out", "run"], tmp_path, under, PODIUM_CACHE=cache)
    assert done.returncode == 0, done.stderr
    simulated = ["train", "neuron/quick", "workload.data.samples=64", "--out", "other"]
    assert_user_error(run(simulated, tmp_path, under, PODIUM_CACHE=cache), str(cache))
    assert not (tmp_path / "other").exists()


def test_a_full_shared_memory_does_no_harm_to_two_instances(tmp_path, weights_alone):
    under = with_mounted("/dev/shm", "8k")
    done = run(["train", *RECIPE, "--instances", "2", "--out", "run"], tmp_path, under)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == weights_alone(RECIPE)


def test_two_runs_at_once_share_a_cache_but_not_a_folder(tmp_path, weights_alone):
    """Started together: of two in one folder one trains and the other says why not; a third one has its own."""
    words = ["train", *RECIPE, "engine.tune=off"]
    with started(*words, "train.length=1000000up", "--out", "run", cwd=tmp_path) as first:
        first.until_records(tmp_path / "run")
        assert_user_error(run([*words, "--out", "run"], tmp_path), "run already holds a run")
        assert_user_error(run(["resume", "run"], tmp_path), "run is being trained by another process")
        done = run([*words, "--out", "other"], tmp_path)
        assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "other").summary()["weights_sha256"] == weights_alone(RECIPE)


def test_of_two_that_start_in_one_folder_at_the_same_time_one_trains(tmp_path):
    command = podium_command("train", *RECIPE, "--out", "run")
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [(process.communicate(timeout=DEADLINE_S)[1], process.returncode) for process in both]
    assert sorted(code for _, code in ended) == [0, 2], ended
    assert not any("Traceback" in errors for errors, _ in ended), ended
    assert Run(tmp_path / "run").summary()["state"] == "done"


def test_whoever_comes_second_leaves_the_folder_to_the_first(tmp_path, monkeypatch):
    """Both have found the folder free before either created it."""
    recipe = load_recipe(RECIPE[0], RECIPE[1:])
    first = create_run(tmp_path / "run", recipe, {"started": "2026-01-01T00:00:00+00:00"})
    before = run_files(tmp_path)
    monkeypatch.setattr("podium.runs.folder.check_free", lambda path: None)
    with pytest.raises(UserError, match="another run is starting in"):
        create_run(tmp_path / "run", recipe, {"started": "2026-01-01T00:00:01+00:00"})
    assert run_files(tmp_path) == before
    assert first.environment() == {"started": "2026-01-01T00:00:00+00:00"}
