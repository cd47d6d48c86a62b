"""`podium board`: TensorBoard on runs that others may have made, on a machine that others use."""

import http.client
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from podium.commands.board import prepare
from podium.commands.report import compared
from tests.support.made_runs import make_run
from tests.support.processes import podium_command, until


@pytest.fixture
def runs(tmp_path) -> Path:
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
def test_it_listens_on_loopback_and_answers_only_who_knows_its_address(runs, tmp_path):
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(podium_command("board", runs, "--port", 0), stdout=said, stderr=said)
    try:

        def address() -> re.Match[str] | None:
            assert process.poll() is None, (tmp_path / "said").read_text()
            return re.search(r"http://127\.0\.0\.1:(\d+)(/[\w-]{20,}/)", (tmp_path / "said").read_text())

        until(address, "TensorBoard says where it is")
        found = address()
        assert found is not None
        port, path = int(found[1]), found[2]
        served = [process, *psutil.Process(process.pid).children(recursive=True)]
        assert not any(path.strip("/") in word for one in served for word in psutil.Process(one.pid).cmdline())
        listening = [
            connection.laddr.ip
            for one in served
            for connection in psutil.Process(one.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        assert status(port, path) == status(port, f"{path}data/runs") == 200
        assert [status(port, other) for other in ("/", "/data/runs", f"{path[:-2]}/data/runs")] == [404] * 3
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert not any(psutil.pid_exists(one.pid) for one in served[1:])


def test_event_files_that_are_none_are_left_out(runs, tmp_path):
    for name in ("a", "b"):
        (runs / name / "tensorboard").mkdir()
    (runs / "a" / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    os.mkfifo(runs / "a" / "tensorboard" / "events.out.tfevents.2")
    (runs / "b" / "tensorboard" / "events.out.tfevents.3").symlink_to("/dev/zero")
    comparison, _ = compared([runs])
    prepare(comparison, tmp_path / "shown")
    links = sorted(path.name for path in (tmp_path / "shown").rglob("*") if path.is_symlink())
    assert links == ["events.out.tfevents.1"]
