"""One command on one host starts the other by a real ssh, and takes it along when it ends."""

import signal

import psutil
import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, SPREAD, ended, on_host
from tests.support.processes import num_records, sentence, until
from tests.support.ssh import RECIPE

pytestmark = pytest.mark.slow


def test_one_command_trains_on_both_hosts_is_interrupted_and_resumed_to_the_same_weights(door, tmp_path, weights_alone):
    run = Run(tmp_path / "run")
    first = door.train(tmp_path)
    until(lambda: num_records(run) >= 3 or first.process.poll() is not None, "records")
    assert len(door.left_behind()) > 0
    first.process.send_signal(signal.SIGTERM)
    code, errors = ended(first)
    assert code == 75, errors
    assert "stopped by SIGTERM" in sentence(errors)
    assert run.summary()["state"] == "interrupted"
    door.until_empty()

    saved = num_records(run)
    second = on_host(door.names[0], tmp_path, "resume", "run", *SPREAD)
    until(lambda: num_records(run) > saved or second.process.poll() is not None, "more records")
    (connection,) = [child for child in psutil.Process(second.process.pid).children() if child.name() == "ssh"]
    connection.kill()  # the hosts still hear each other, so this changes nothing
    code, errors = ended(second)
    assert code == 0, errors
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert run.summary()["topology"]["hosts"] == 2
    door.until_empty()


def test_a_host_that_ssh_cannot_start_is_one_sentence_at_once(door, tmp_path):
    stranger = f"launch.ssh={door.ssh(key='stranger')}"
    code, errors = ended(door.train(tmp_path, stranger), timeout=60)  # launch.timeout is 300
    assert code == 2, errors
    assert f"{HOSTS[1]} could not be started by ssh (exit 255): " in sentence(errors)
    assert "Permission denied" in sentence(errors)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_nothing_stays_on_the_other_host_when_the_first_is_killed(moment, door, tmp_path):
    run = Run(tmp_path / "run")
    first = door.train(tmp_path)
    happened = {"starting": lambda: any("--join" in line for line in door.left_behind()),
                "training": lambda: num_records(run) >= 3}[moment]  # fmt: skip
    until(lambda: happened() or first.process.poll() is not None, moment)
    first.process.kill()
    ended(first)
    door.until_empty()
    if moment == "training":
        until(lambda: run.summary()["state"] == "interrupted", "saved by the instances")
