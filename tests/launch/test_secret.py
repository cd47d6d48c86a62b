"""The secret of a run: where it may come from, who may read it, and where it never is."""

import os

import pytest

from podium.errors import UserError
from podium.launch.secret import new_secret, read_secret_line, take_secret, users_secret
from podium.launch.ssh import RemoteHost
from tests.support.processes import assert_user_error, podium_here, until

SECRET = "0123456789abcdef0123456789abcdef"


def written(path, text=SECRET, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_is_taken_before_the_environment_which_loses_it_either_way(tmp_path):
    env = {"PODIUM_SECRET": "of the environment", "OTHER": "x"}
    assert take_secret(written(tmp_path / "secret", SECRET + "\n"), env) == SECRET.encode()
    assert env == {"OTHER": "x"}
    env["PODIUM_SECRET"] = SECRET
    assert take_secret(None, env) == SECRET.encode()
    assert env == {"OTHER": "x"}
    assert take_secret(None, env) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused(mode, tmp_path):
    with pytest.raises(UserError, match=rf"secret can be read by others \(mode {mode:04o}\): chmod 600 "):
        take_secret(written(tmp_path / "secret", mode=mode), {})


def test_a_file_of_another_user_is_refused(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    path = written(tmp_path / "secret")
    os.chown(path, 65534, -1)
    with pytest.raises(UserError, match="secret belongs to another user: a secret must be in a file of your own"):
        take_secret(path, {})


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "short", "long"])
def test_what_is_no_secret_is_one_sentence(kind, tmp_path):
    path = tmp_path / "secret"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind != "missing":
        written(path, {"empty": "", "short": "guess me", "long": "x" * 5000}[kind])
    part = {"missing": "cannot be read: No such file or directory", "folder": "cannot be read: Is a directory",
            "pipe": "expected a file with a secret in it"}  # fmt: skip
    assert_user_error(
        podium_here("train", "mnist", "--hosts", "a,b", "--join", "--secret-file", path),
        f"{path}",
        part.get(kind, "expected a secret of 16 to 4096 characters; `openssl rand -hex 32` makes a good one"),
    )


def test_the_key_in_the_home_is_made_once_for_its_user_alone_and_gives_each_purpose_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    first, second = users_secret("slurm 1"), users_secret("slurm 2")
    assert first == users_secret("slurm 1") != second
    (key,) = (tmp_path / "config" / "podium").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_bytes() not in (first, second)
    key.chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        users_secret("slurm 1")


def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*: give them a secret with --secret-file or PODIUM"):
        users_secret("slurm 1")


def test_ssh_carries_the_secret_on_its_input_and_nowhere_else(tmp_path):
    secret = new_secret()
    assert secret != new_secret()
    environment = dict(os.environ)
    other = RemoteHost("b", ["sh", "-c", f"read line; echo $line > {tmp_path}/read; env > {tmp_path}/env; cat"], secret)
    until(lambda: (tmp_path / "env").exists() and (tmp_path / "env").read_text(), "what it was given")
    assert (tmp_path / "read").read_bytes() == secret + b"\n"
    assert secret.decode() not in (tmp_path / "env").read_text()
    assert environment == dict(os.environ)
    other.end()


def test_the_first_line_of_the_input_is_the_secret_and_the_rest_stays():
    readable, writable = os.pipe()
    os.write(writable, SECRET.encode() + b"\nmore")
    assert read_secret_line(readable) == SECRET.encode()
    assert os.read(readable, 10) == b"more"
    os.close(writable)
    with pytest.raises(UserError, match="standard input: expected a secret"):
        read_secret_line(readable)
    os.close(readable)
