"""`podium monitor --web`: shown to browsers of this machine that know the token, and nothing else to anybody."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from podium.errors import UserError
from podium.monitor import web
from podium.monitor.view import Watcher
from podium.monitor.web import WebView
from podium.runs.folder import Run
from tests.monitor.test_view import run_of, said

NASTY = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    states = [said(index, 3, waits=waits) for index, waits in enumerate((0.3, 0.01, 0.3))]
    states[0]["values"] |= {"cpu_percent": 90.0, "memory_bytes": 1e9}
    states[0]["host"] = NASTY
    run = run_of(tmp_path_factory.mktemp("web"), *states)
    run.metrics_file.write_text(
        "".join(
            json.dumps({"update": k, "train/loss": 1 / k, "valid/loss": 2 / k, f"valid/{NASTY}": 1.0}) + "\n"
            for k in range(1, 60)
        )
    )
    run.log.mkdir()
    run.instance_log(0).write_text(f"{NASTY}\x1b[2J\n")
    return run


@pytest.fixture(scope="module")
def served(run) -> Iterator[WebView]:
    view = WebView(Watcher(run))
    thread = threading.Thread(target=view.serve)
    thread.start()
    yield view
    view.close()
    thread.join()


def asked(view: WebView, path: str, method: str = "GET", host: str | None = None, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", view.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host or f"127.0.0.1:{view.port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer, text


def test_with_the_token_there_are_a_page_and_data(served):
    page, text = asked(served, f"/{served.token}/")
    assert page.status == 200
    assert NASTY.encode() not in text
    assert page.headers["Referrer-Policy"] == "no-referrer"  # the address is a secret
    assert page.headers["Cache-Control"] == "no-store"
    _, text = asked(served, f"/{served.token}/view.json")
    view = json.loads(text)
    assert view["update"] == 59
    assert view["waiting"].startswith("the others wait for instance 1")
    assert "\x1b" not in view["log"][0]
    _, nothing = asked(served, f"/{served.token}/", "HEAD")
    assert nothing == b""


@pytest.mark.parametrize(
    ("path", "method", "host"),
    [
        ("/", "GET", None),
        ("/TOKEN", "GET", None),
        ("/TOKEN/../TOKEN/", "GET", None),
        ("/TOKEN/view.json?callback=steal", "GET", None),
        ("/TOKENx/", "GET", None),
        ("/TOKEN/", "POST", None),
        ("/TOKEN/", "REFLECT", None),
        ("/TOKEN/", "GET", "evil.example"),
        ("/TOKEN/", "GET", "evil.example:PORT"),
        ("/TOKEN/", "GET", "127.0.0.1"),
        ("/" + "x" * 60_000, "GET", None),
    ],
)
def test_everything_else_is_refused_without_a_word_of_the_request(path, method, host, served):
    fill = lambda text: text and text.replace("TOKEN", served.token).replace("PORT", str(served.port))  # noqa: E731
    answer, text = asked(served, fill(path), method, fill(host), Origin="http://evil.example", X="reflect-me")
    assert answer.status in (404, 414, 501)
    assert text in (b"not found\n", b"refused\n")
    assert "reflect" not in str(answer.headers).lower()


def test_lines_that_are_no_request_are_not_repeated(served):
    for line in (b"GET /reflect-me HTTP/9.9 reflect\r\n\r\n", b"\x00reflect-me\r\n\r\n", b"GET / HTTP/1.1\r\n" * 300):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(4096):
                answer += part
        assert b"reflect" not in answer


def test_it_listens_on_loopback_only(served):
    assert served._server.server_address[0] == "127.0.0.1"
    assert served.address.startswith(f"http://127.0.0.1:{served.port}/")
    assert len(served.token) >= 32


def test_those_who_are_silent_or_slow_keep_nobody_else_out_for_long(run, monkeypatch):
    monkeypatch.setattr(web._Handler, "timeout", 0.3)
    view = WebView(Watcher(run))
    thread = threading.Thread(target=view.serve)
    thread.start()
    silent = [socket.create_connection(("127.0.0.1", view.port)) for _ in range(16)]
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                answer, _ = asked(view, f"/{view.token}/")
                break
            except (OSError, http.client.HTTPException):  # there were sixteen already
                assert time.monotonic() < deadline
        assert answer.status == 200
    finally:
        for connection in silent:
            connection.close()
        view.close()
        thread.join()


def test_a_port_that_is_taken_is_told(run, served):
    with pytest.raises(UserError, match=f"--port {served.port} cannot be listened on"):
        WebView(Watcher(run), served.port)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_the_page_in_a_browser(width, dark, run, served, open_page, tmp_path):
    page = open_page(served.address, width=width, dark=dark)
    page.wait_for_selector("#rows tr")
    assert page.locator("#state").inner_text() == "running"
    assert "the others wait for instance 1" in page.locator("#waiting").inner_text()
    assert NASTY in page.locator("#rows").inner_text()
    assert page.locator(".plot").count() >= 2
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    with run.metrics_file.open("a") as file:
        file.write('{"update": 77, "train/loss": 0.001}\n')
    page.get_by_text("update 77 of").wait_for(timeout=10_000)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
