"""The view of a run as a page, served to browsers on this machine. Used by `podium monitor RUN --web`.

Other users of the machine can reach the port, and a page of any website can send requests to it. So the address has a
random token, without which there is nothing; the Host must be this one, or a website could pass for it by its name
server (DNS rebinding); and no request changes anything, is answered with anything of itself, or takes long.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from podium.errors import UserError, system_reason
from podium.monitor.figures import measured, missing
from podium.monitor.screen import drawings_of
from podium.monitor.view import View, Watcher
from podium.ui.page import render_page, short
from podium.ui.visible import visible

_LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 24
#: at once; seconds for a message, and for a whole request; the longest line of one
_MAX_REQUESTS, _SILENT_S, _REQUEST_S, _LINE_BYTES = 16, 5.0, 20.0, 4096
#: how often the run is looked at, however often it is asked for
_LOOK_S = 1.0
_MAX_POINTS, _MAX_DRAWINGS, _MAX_ROWS, _MAX_LOG = 600, 16, 256, 60
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class WebView:
    """A server on loopback that shows one run until `close`. It listens once it is made."""

    def __init__(self, watcher: Watcher, port: int = 0) -> None:
        self._watcher = watcher
        self._lock, self._looked_at, self._data = threading.Lock(), -_LOOK_S, b"{}"
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._page = render_page(
            "monitor.html.j2", "podium.monitor", title=watcher.look().name, data={}, scripts=["monitor.js"], live=True
        ).encode()
        try:
            self._server = _Server(port, self)
        except OSError as error:
            raise UserError(f"--port {port} cannot be listened on: {system_reason(error)}") from None
        self.port = int(self._server.server_address[1])
        self.hosts = {f"{name}:{self.port}" for name in (_LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{_LOOPBACK}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return the kind and the text of what a path leads to, None for all others."""
        for name, kind in {"": "text/html; charset=utf-8", "view.json": "application/json"}.items():
            if hmac.compare_digest(path.encode(errors="replace"), f"/{self.token}/{name}".encode()):
                return kind, self._page if not name else self._view()
        return None

    def _view(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._data = json.dumps(view_data(self._watcher.look()), allow_nan=False).encode()
                self._looked_at = time.monotonic()
            return self._data


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MAX_REQUESTS

    def __init__(self, port: int, view: WebView) -> None:
        self.view, self._free = view, threading.Semaphore(_MAX_REQUESTS)
        super().__init__((_LOOPBACK, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_REQUEST_S, _end, [request])  # also of one that sends a byte now and then
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a request that breaks off is no matter of the one who looks."""


def _end(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "podium", ""
    timeout = _SILENT_S

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        found = None
        if len(hosts) == 1 and hosts[0].lower() in self.server.view.hosts and len(self.path) <= _LINE_BYTES:
            found = self.server.view.answer(self.path)
        self._send(404, "text/plain", b"not found\n") if found is None else self._send(200, *found)

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the code alone; the library's own text would repeat parts of the request."""
        with suppress(OSError):
            self._send(code, "text/plain", b"refused\n")

    def _send(self, code: int, kind: str, text: bytes) -> None:
        self.close_connection = True
        self.send_response_only(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def view_data(view: View) -> dict[str, Any]:
    """Return a view as what `monitor.js` takes; all texts are safe to show."""
    return {
        "name": view.name,
        "state": view.state,
        "sentence": view.sentence,
        "update": view.update,
        "total": view.total_updates,
        "epoch": _number(view.epoch),
        "rate": _number(view.samples_per_second),
        "left": _number(view.left_s),
        "last": {
            visible(name): _number(value) for name, value in view.last.items() if name.startswith(("train/", "valid/"))
        },
        "drawings": [
            {"title": visible(name).replace("_", " "), "lines": [_line(one.name, one.points) for one in curves]}
            for name, curves in drawings_of(view)[:_MAX_DRAWINGS]
        ],
        "rows": [
            {
                "index": row.index,
                "host": row.host,
                "doing": f"silent {row.silent_s:.0f} s" if row.silent_s else row.doing,
                "silent": row.silent_s > 0,
                "rate": _number(row.rate),
                "shares": [_number(row.compute), _number(row.waits), _number(row.input_wait)],
                "cpu": _number(row.cpu_percent),
                "memory": _number(row.memory_bytes),
            }
            for row in view.rows[:_MAX_ROWS]
        ],
        "hidden": max(0, len(view.rows) - _MAX_ROWS),
        "waiting": view.waiting,
        "figures": [
            {
                "host": visible(host),
                "measured": measured(values),
                "unknown": [(names, visible(reason)) for names, reason in missing(values, unknown)],
            }
            for host, values, unknown in view.figures[:_MAX_ROWS]
        ],
        "log": list(view.log[-_MAX_LOG:]),
    }


def _line(name: str, points: Sequence[tuple[float, float]]) -> Mapping[str, Any]:
    every = -(-len(points) // _MAX_POINTS) or 1
    kept = points[::-1][::every][::-1]  # the last one is always there
    return {"name": name.replace("_", " "), "x": [x for x, _ in kept], "y": [short(y) for _, y in kept]}


def _number(value: float | None) -> float | None:
    return None if value is None else short(value)
