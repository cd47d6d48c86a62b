"""Progress and time left for Kubeflow: what a TrainJob shows of a training that runs in it.

The trainer of Kubeflow puts an address, a certificate and a token into the pods of a TrainJob (where its feature gate
TrainJobStatus is on), and takes a small JSON there. A thread of its own sends the newest record, now and then; nothing
waits for it. Opened by `metrics.py`.
"""

import json
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from podium.errors import UserError
from podium.machine.bounded_files import read_limited

ADDRESS, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_TIMEOUT_S = 5.0
#: the server asks for no more than one in five seconds
_BETWEEN_S = 5.0
#: so many failures in a row, and it is given up
_MOST_FAILURES = 3
_TOKEN_BYTES = 1 << 16

Record = Mapping[str, float]


class KubeflowStatus:
    """Sends how far a training is."""

    def __init__(self, env: Mapping[str, str], total_updates: int, between_s: float = _BETWEEN_S) -> None:
        """Take the address from the environment; raise UserError where it cannot be used."""
        self._address, self._token, self._total = env[ADDRESS], env.get(TOKEN, ""), total_updates
        if not self._address.startswith("https://"):
            raise UserError(f"{ADDRESS} is not an address of https, which the token must not travel without")
        context = ssl.create_default_context(cafile=env.get(CERTIFICATE) or None)
        self._opener = build_opener(HTTPSHandler(context=context), _NoRedirection())
        self._between_s = between_s
        self._newest: Record | None = None
        self._ends, self._failures, self._problem = False, 0, ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Leave a record for the thread; raise UserError once the server has refused too often."""
        if self._failures >= _MOST_FAILURES:
            raise UserError(f"Kubeflow's trainer does not take the progress: {self._problem}")
        with self._changed:
            self._newest = dict(record)
            self._changed.notify()

    def close(self, failed: bool = False) -> None:
        """Send what is newest, and end; that the training failed is told by its exit code."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(2 * _TIMEOUT_S)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self._newest is not None)
                record, self._newest = self._newest, None
            if record is not None:
                self._send(record)
            with self._changed:
                if self._ends and self._newest is None:
                    return
                self._changed.wait_for(lambda: self._ends, self._between_s)

    def _send(self, record: Record) -> None:
        body = json.dumps({"trainerStatus": status_of(record, self._total)}).encode()
        try:
            # Read anew each time, as it is replaced every hour.
            token = read_limited(Path(self._token), _TOKEN_BYTES).decode("ascii").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            with self._opener.open(Request(self._address, body, headers, method="POST"), timeout=_TIMEOUT_S):
                self._failures = 0
        except (OSError, ValueError) as error:
            self._failures += 1
            self._problem = str(error) or type(error).__name__


class _NoRedirection(HTTPRedirectHandler):
    """A token is for one address."""

    def redirect_request(self, *args: Any) -> None:
        return None


def status_of(record: Record, total_updates: int) -> dict[str, Any]:
    """Return what the server takes of a record: percent, seconds left, and the metrics as text."""
    update, rate = int(record["update"]), record.get("train/samples_per_second", 0.0)
    status: dict[str, Any] = {"lastUpdatedTime": datetime.fromtimestamp(time.time(), UTC).isoformat()}
    if total_updates > 0:
        status["progressPercentage"] = min(100, 100 * update // total_updates)
        if rate > 0 and update > 0:
            left = (total_updates - update) * record["samples"] / update / rate
            status["estimatedRemainingSeconds"] = max(0, round(left))
    shown = {name: value for name, value in record.items() if name.startswith(("train/", "valid/"))}
    return {**status, "metrics": [{"name": name, "value": f"{value:g}"} for name, value in shown.items()]}
