"""Limits of memory, mirrors that misbehave, and text that would steer a terminal: one sentence each."""

import hashlib
import resource
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from podium.data import download
from podium.data.download import DataSet, RemoteFile, fetch
from podium.errors import UserError
from podium.machine.memory_shortage import memory_shortage
from podium.ui.visible import visible, visible_lines
from tests.support.processes import assert_user_error, podium_command, podium_here
from tests.support.recipes import TINY

CONTENT = b"numbers" * 100


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [300, 600])
def test_a_limit_on_memory_is_one_sentence(tmp_path, megabytes):
    """With the smaller one torch cannot be loaded, with the larger one libraries end the process without a word."""
    limit = megabytes << 20
    done = subprocess.run(
        podium_command("train", *TINY["mnist"], "--out", "run"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert_user_error(done, "there is too little memory", "`ulimit -v`", "raise that limit")


def test_memory_that_runs_out_later_is_one_sentence_too(monkeypatch):
    monkeypatch.setattr("podium.commands.show.show", lambda *_: bytearray(1 << 62))
    assert_user_error(podium_here("show", "mnist"), "memory ran out")


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert memory_shortage(RuntimeError("shapes do not match")) is None
    assert memory_shortage(OSError(28, "No space left on device")) is None
    assert "memory ran out" in memory_shortage(MemoryError())
    assert "memory ran out" in memory_shortage(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    )
    assert "memory ran out" in memory_shortage(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize(
    "mirror",
    [
        "nonsense",
        "http://",
        "http://[",
        "http://host:port/x",
        "ftp://host/x",
        "javascript:x",
        "http://a b",
        "http://\x1b[2J",
    ],
)
def test_mirrors_that_are_no_addresses(monkeypatch, tmp_path, mirror):
    monkeypatch.setenv("PODIUM_MIRROR", f"https://example.org/data, {mirror}")
    done = podium_here("data", "fetch", "mnist", "--out", tmp_path)
    assert_user_error(done, "PODIUM_MIRROR = ", "expected addresses separated by commas")
    assert "\x1b" not in done.stderr


class Mirror(BaseHTTPRequestHandler):
    """Sends for ever, more than it should, or somewhere else, as the folder in the address says."""

    sent = 0

    def do_GET(self):
        folder = self.path.split("/")[1]
        if folder == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/a.gz")
            self.end_headers()
            return
        if folder == "file":
            self.send_response(302)
            self.send_header("Location", f"file://{self.server.secret}")
            self.end_headers()
            return
        self.send_response(200)
        if folder == "large":
            self.send_header("Content-Length", str(10**17))
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
                Mirror.sent += 1 << 16
        except OSError:
            pass  # left by the reader

    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    file = RemoteFile("a.gz", hashlib.sha256(CONTENT).hexdigest(), 1 << 20)
    monkeypatch.setattr(download, "DATA_SETS", {"digits": DataSet((file,), ())})
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "secret" / "a.gz").parent.mkdir()
    (tmp_path / "secret" / "a.gz").write_bytes(CONTENT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.secret = tmp_path / "secret" / "a.gz"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("folder", "part"),
    [
        ("endless", "it sent more than the 1,048,576 bytes of the published file"),
        ("large", "its file has 100,000,000,000,000,000 bytes, more than the 1,048,576 of the published one"),
        ("elsewhere", "it leads to ftp://127.0.0.1/a.gz, which is not on the web"),
        ("file", "HTTP 302 Found"),
    ],
)
def test_mirrors_that_misbehave_are_left(mirror, tmp_path, folder, part):
    with pytest.raises(UserError) as caught:
        fetch("digits", tmp_path / "out", [f"{mirror}/{folder}"])
    assert part in str(caught.value)
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) == 0


def test_characters_that_steer_terminals_are_written_out():
    assert visible("plain text, ü, 漢字, 😀 · →") == "plain text, ü, 漢字, 😀 · →"
    assert visible("\x1b[31m\x07\r\n\x7f\x9b") == r"\x1b[31m\x07\x0d\x0a\x7f\x9b"
    assert visible("a\u202eb\u2066c\u200bd\u2028e\ufefff") == r"a\u202eb\u2066c\u200bd\u2028e\ufefff"
    assert visible("\udcff\ud800\U000e0041") == r"\xff\ud800\U000e0041"
    assert visible_lines("a\x1b\nb\r") == "a\\x1b\nb\\x0d"
