"""What a TrainJob of Kubeflow hears of a training: by the published schema, over TLS, and never in the way."""

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as StatusRequest

from podium.errors import UserError
from podium.runs.kubeflow import ADDRESS, CERTIFICATE, TOKEN, KubeflowStatus, status_of
from tests.support.processes import podium_here, until
from tests.support.recipes import TINY

RECORD = {"update": 50, "epoch": 1.0, "samples": 3200, "train/loss": 0.25, "train/samples_per_second": 64.0}


class Trainer:
    """The server of the trainer: takes status, over TLS, from who has the token."""

    def __init__(self, folder: Path, *, code: int = 200) -> None:
        self.taken: list[dict] = []
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                allowed = self.headers["Authorization"] == "Bearer the-token"
                if allowed:
                    trainer.taken.append(json.loads(body))
                self.send_response(code if allowed else 401)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        key, certificate = folder / "key.pem", folder / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        (folder / "token").write_text("the-token\n")
        self.env = {
            ADDRESS: f"https://127.0.0.1:{self._server.server_port}/apis/trainer.kubeflow.org/v1alpha1/status",
            CERTIFICATE: str(certificate),
            TOKEN: str(folder / "token"),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def trainer(tmp_path, request):
    running = Trainer(tmp_path, code=getattr(request, "param", 200))
    yield running
    running.close()


def test_progress_and_time_left_are_those_of_the_record_and_valid_by_the_published_schema():
    request = {"trainerStatus": status_of(RECORD, 200)}
    status = StatusRequest.from_dict(request).trainer_status
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (25, 150)
    assert {metric.name: metric.value for metric in status.metrics} == {
        "train/loss": "0.25", "train/samples_per_second": "64",
    }  # fmt: skip


def test_a_training_in_a_trainjob_says_how_far_it_is(trainer, tmp_path, monkeypatch):
    for name, value in trainer.env.items():
        monkeypatch.setenv(name, value)
    done = podium_here("train", *TINY["mnist"], "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    last = StatusRequest.from_dict(trainer.taken[-1]).trainer_status
    assert (last.progress_percentage, last.estimated_remaining_seconds) == (100, 0)
    assert "valid/accuracy" in {metric.name for metric in last.metrics}
    assert "the-token" not in done.stdout + done.stderr


@pytest.mark.parametrize("trainer", [500, 302], indirect=True)
def test_a_server_that_refuses_is_told_and_given_up(trainer):
    status = KubeflowStatus(trainer.env, 200, between_s=0.0)
    for number in range(1, 4):
        status.write(RECORD)
        until(lambda number=number: len(trainer.taken) == number, "the next request")
    until(lambda: status._failures == 3, "the last answer")
    with pytest.raises(UserError, match="does not take the progress: HTTP Error"):
        status.write(RECORD)
    status.close()
    assert len(trainer.taken) == 3


def test_a_token_goes_nowhere_without_tls_or_to_a_server_with_another_certificate(trainer, tmp_path):
    with pytest.raises(UserError, match="is not an address of https"):
        KubeflowStatus({**trainer.env, ADDRESS: trainer.env[ADDRESS].replace("https", "http")}, 200)
    status = KubeflowStatus({name: value for name, value in trainer.env.items() if name != CERTIFICATE}, 200)
    status.write(RECORD)
    status.close()
    assert trainer.taken == []
