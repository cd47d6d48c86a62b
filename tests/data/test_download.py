"""Downloads, against servers on this machine only: each test says how its server misbehaves."""

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from podium.data import download as fetching
from podium.data.download import DATA_SETS, DataSet, RemoteFile, fetch
from podium.errors import UserError

CONTENT = {"a.gz": bytes(range(256)) * 4000, "b.gz": b"labels" * 100}


class Server:
    """Serves CONTENT under any folder; `behaviour` changes how. Remembers (path, Range header) of every request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.content_length = True
        self.folder: str | None = None
        self.change: Callable[[bytes], bytes] = lambda content: content
        #: bytes after which an answer breaks off, one entry per request; None: not at all
        self.breaks: list[int | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server._answer(self)

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.requests.append((handler.path, asked))
        folder, _, name = handler.path.rpartition("/")
        if name not in CONTENT or (self.folder is not None and folder != self.folder):
            handler.send_error(404)
            return
        content = self.change(CONTENT[name])
        start = int(re.match(r"bytes=(\d+)-$", asked)[1]) if asked and self.ranges else None
        if start is not None and start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(200 if start is None else 206)
        if start is not None:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        body = content[start or 0 :]
        if self.content_length:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def start_server() -> Iterator[Callable[[], Server]]:
    servers: list[Server] = []

    def start() -> Server:
        servers.append(Server())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server) -> Server:
    return start_server()


@pytest.fixture(autouse=True)
def _only_this_machine(monkeypatch, tmp_path):
    files = tuple(RemoteFile(name, hashlib.sha256(content).hexdigest()) for name, content in CONTENT.items())
    monkeypatch.setattr(fetching, "DATA_SETS", {"digits": DataSet(files, mirrors=())})
    monkeypatch.setattr(fetching, "TIMEOUT_S", 5.0)
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("PODIUM_MIRROR", raising=False)


def _is_complete(folder: Path) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def test_files_arrive_whole_under_their_names_with_progress(server, tmp_path):
    steps = []
    paths = fetch("digits", tmp_path / "x", [server.address + "/deep/"], lambda *step: steps.append(step))
    assert [path.name for path in paths] == list(CONTENT)
    assert _is_complete(tmp_path / "x")
    assert steps[0] == ("a.gz", 0, len(CONTENT["a.gz"]))
    assert steps[-1] == ("b.gz", len(CONTENT["b.gz"]), len(CONTENT["b.gz"]))
    assert server.requests[0] == ("/deep/a.gz", None)


def test_the_cache_is_the_default_place(server, tmp_path):
    assert fetch("digits", mirrors=[server.address])[0] == tmp_path / "cache" / "data" / "digits" / "a.gz"


def test_what_is_there_already_is_not_fetched_again(server, tmp_path):
    fetch("digits", tmp_path, [server.address])
    num_requests = len(server.requests)
    fetch("digits", tmp_path, [server.address])
    fetch("digits", tmp_path, [])
    assert len(server.requests) == num_requests


def test_a_file_with_another_content_is_replaced(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"something else")
    fetch("digits", tmp_path, [server.address])
    assert _is_complete(tmp_path)


def test_an_earlier_part_is_continued(server, tmp_path):
    (tmp_path / "a.gz.part").write_bytes(CONTENT["a.gz"][:1000])
    fetch("digits", tmp_path, [server.address])
    assert server.requests[0] == ("/a.gz", "bytes=1000-")
    assert _is_complete(tmp_path)


def test_a_server_that_ignores_range_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / "a.gz.part").write_bytes(CONTENT["a.gz"][:1000])
    fetch("digits", tmp_path, [server.address])
    assert len(server.requests) == 2
    assert _is_complete(tmp_path)


def test_a_part_that_is_already_whole_is_only_checked(server, tmp_path):
    (tmp_path / "a.gz.part").write_bytes(CONTENT["a.gz"])
    fetch("digits", tmp_path, [server.address])
    assert _is_complete(tmp_path)


@pytest.mark.parametrize("part", [b"wrong beginning", bytes(2 * len(CONTENT["a.gz"]))], ids=["short", "too long"])
def test_a_wrong_part_is_thrown_away_and_fetched_anew(server, tmp_path, part):
    (tmp_path / "a.gz.part").write_bytes(part)
    fetch("digits", tmp_path, [server.address])
    assert _is_complete(tmp_path)


def test_a_broken_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.breaks = [5000, 7000]
    fetch("digits", tmp_path, [server.address])
    assert [asked for path, asked in server.requests if path == "/a.gz"] == [None, "bytes=5000-", "bytes=12000-"]
    assert _is_complete(tmp_path)


def test_another_mirror_finishes_what_one_began_and_serves_the_rest(start_server, tmp_path):
    breaking, sound = start_server(), start_server()
    breaking.breaks = [5000, 0]
    fetch("digits", tmp_path, [breaking.address, sound.address])
    assert sound.requests == [("/a.gz", "bytes=5000-"), ("/b.gz", None)]
    assert _is_complete(tmp_path)


def test_what_came_is_kept_for_the_next_call(server, tmp_path):
    server.breaks = [5000, 0]
    with pytest.raises(UserError, match="broke off after 5,000 of"):
        fetch("digits", tmp_path, [server.address])
    assert (tmp_path / "a.gz.part").stat().st_size == 5000
    fetch("digits", tmp_path, [server.address])
    assert _is_complete(tmp_path)


@pytest.mark.parametrize("content_length", [True, False])
def test_a_wrong_checksum_leaves_nothing_behind(server, tmp_path, content_length):
    server.content_length = content_length
    server.change = lambda content: content[:-1] + b"?"
    with pytest.raises(UserError, match="published sha256"):
        fetch("digits", tmp_path, [server.address])
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_with_wrong_content_is_passed_over(start_server, tmp_path):
    wrong, sound = start_server(), start_server()
    wrong.change = lambda content: b"<html>please log in</html>"
    fetch("digits", tmp_path, [wrong.address, sound.address])
    assert _is_complete(tmp_path)


def test_a_server_that_does_not_say_the_size_is_fine(server, tmp_path):
    server.content_length = False
    totals = set()
    fetch("digits", tmp_path, [server.address], lambda _name, _done, total: totals.add(total))
    assert totals == {None}
    assert _is_complete(tmp_path)


@pytest.mark.parametrize("folder", ["/lab", "/lab/digits"])
def test_podium_mirror_comes_first_with_or_without_the_name(start_server, tmp_path, monkeypatch, folder):
    own, other = start_server(), start_server()
    own.folder = folder
    monkeypatch.setenv("PODIUM_MIRROR", f" http://127.0.0.1:9/nobody , {own.address}/lab/")
    fetch("digits", tmp_path, [other.address])
    assert other.requests == []
    assert _is_complete(tmp_path)


def test_a_folder_of_files_can_be_a_mirror(tmp_path):
    (tmp_path / "from").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "from" / name).write_bytes(content)
    fetch("digits", tmp_path / "to", [(tmp_path / "from").as_uri()])
    assert _is_complete(tmp_path / "to")


def test_total_failure_is_one_sentence_that_says_what_was_tried_and_what_to_do(server, tmp_path):
    server.folder = "/elsewhere"
    with pytest.raises(UserError) as caught:
        fetch("digits", tmp_path, ["http://127.0.0.1:9", server.address, "nonsense"])
    sentence = str(caught.value)
    for part in ("digits", "127.0.0.1:9", "HTTP 404", "nonsense", "a.gz and b.gz", str(tmp_path), "workload.data.path"):
        assert part in sentence
    assert "PODIUM_MIRROR" in sentence
    assert "\n" not in sentence


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="Cannot write digits into"):
        fetch("digits", tmp_path / "file", [server.address])


def test_an_unknown_data_set_gets_a_suggestion():
    with pytest.raises(UserError, match="did you mean digits"):
        fetch("digit")


def test_every_shipped_data_set_has_checksums_and_mirrors():
    for data_set in DATA_SETS.values():
        assert data_set.mirrors
        assert all(re.fullmatch(r"[0-9a-f]{64}", file.sha256) for file in data_set.files)
        assert len({file.sha256 for file in data_set.files}) == len(data_set.files) == (1 if data_set.members else 4)


def archive(**members: bytes) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return whole.getvalue()


def packed_set(monkeypatch, content: bytes) -> None:
    monkeypatch.setitem(CONTENT, "packed.tar.gz", content)
    file = RemoteFile("packed.tar.gz", hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(fetching.DATA_SETS, "packed", DataSet((file,), (), {"one.bin": 5, "two.bin": 3}))


def test_files_are_taken_out_of_an_archive_and_nothing_else(server, tmp_path, monkeypatch):
    packed_set(monkeypatch, archive(**{"inner/one.bin": b"first", "../two.bin": b"2nd", "x.sh": b"!"}))
    folder = tmp_path / "here" / "data"
    paths = fetch("packed", folder, mirrors=[server.address])
    assert [path.name for path in paths] == ["packed.tar.gz", "one.bin", "two.bin"]
    assert ((folder / "one.bin").read_bytes(), (folder / "two.bin").read_bytes()) == (b"first", b"2nd")
    assert sorted(path.name for path in (tmp_path / "here").rglob("*")) == [
        "data",
        "one.bin",
        "packed.tar.gz",
        "two.bin",
    ]
    (folder / "two.bin").write_bytes(b"cut off"[:2])
    fetch("packed", folder, mirrors=[server.address])
    assert (folder / "two.bin").read_bytes() == b"2nd"
    assert len(server.requests) == 1


def test_an_archive_that_lacks_a_file_is_told(server, tmp_path, monkeypatch):
    packed_set(monkeypatch, archive(**{"one.bin": b"first"}))
    with pytest.raises(UserError, match=r"packed.tar.gz does not hold two.bin"):
        fetch("packed", tmp_path, mirrors=[server.address])


def test_cifar_is_known_with_its_files():
    from podium.data.formats import cifar

    for kind in ("cifar10", "cifar100"):
        assert tuple(DATA_SETS[kind].members) == cifar.file_names(kind)
