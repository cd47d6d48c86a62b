"""Folders of a launch: in one place that only the user can enter; gone after it, at the latest with the next one."""

import os
import signal
import tempfile

import pytest

from podium.errors import UserError
from podium.launch.private_folder import launch_folder, private_folder


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    for name in ("temporary", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))


def test_only_the_user_can_enter(tmp_path):
    with launch_folder() as folder:
        assert folder.parent == private_folder() == tmp_path / "temporary" / f"podium-{os.getuid()}"
        assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert not folder.exists()


def test_folders_of_the_dead_are_removed_and_those_of_the_living_are_not():
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with launch_folder() as left:
            os.write(tell, bytes(left))
            signal.pause()
    left = os.read(ready, 1000).decode()
    with launch_folder() as own:
        assert os.path.isdir(left)  # noqa: PTH112 (a str)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with launch_folder():
            assert own.is_dir()
            assert not os.path.exists(left)  # noqa: PTH110
    os.close(ready)
    os.close(tell)


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_place_that_somebody_else_has_taken_is_not_used(kind, tmp_path):
    squatted = tmp_path / "temporary" / f"podium-{os.getuid()}"
    if kind == "open to others":
        squatted.mkdir()
        squatted.chmod(0o777)
    elif kind == "a link":
        squatted.symlink_to(tmp_path)
    else:
        squatted.write_text("")
    with launch_folder() as folder:
        assert folder.parent.parent == tmp_path / "cache"
    (tmp_path / "cache" / squatted.name).chmod(0o755)
    with pytest.raises(UserError, match="is not a folder that only you can enter: remove it, or set TMPDIR"):
        private_folder()
