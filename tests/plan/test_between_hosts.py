"""The network between hosts, measured through the launcher between two network namespaces."""

import json
import subprocess

import pytest

from podium.distributed.instances import Instances
from podium.errors import UserError
from podium.plan import between_hosts
from tests.support.hosts import HOSTS, SPREAD, ended, inside, on_host
from tests.support.recipes import TINY


@pytest.mark.slow
def test_the_rate_of_a_throttled_cable_is_found(hosts, tmp_path, monkeypatch):
    names, ends = hosts
    for name, end in zip(names, ends, strict=True):
        limit = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
        if subprocess.run(inside(name, *limit), capture_output=True).returncode:
            pytest.skip("the rate of a cable cannot be limited here")
    name, *words = TINY["mnist"]
    args = ["plan", name, *words, "batch.replicas=2", "--measure-network", "--measure", "--seconds", 0.3, *SPREAD]
    env = {"PODIUM_STATE": str(tmp_path / "state"), "PODIUM_CACHE": str(tmp_path / "cache")}
    results = [ended(started) for started in [on_host(host, tmp_path, *args, "--join", env=env) for host in names]]
    assert [code for code, _ in results] == [0, 0], results
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    found = between_hosts.recalled(HOSTS)
    assert found is not None
    assert 0.2 * 25e6 < found.bytes_per_second < 4 * 25e6  # a cable without a limit: a hundred times that
    assert found.latency_s < 0.01
    assert f"measured between {', '.join(HOSTS)}" in found.source


def test_one_instance_alone_sums_at_once():
    assert set(between_hosts.sum_seconds(Instances.alone(), (256, 4096))) == {256, 4096}


@pytest.mark.parametrize(
    "seconds", [{}, {"256": 1.0}, {"256": -1.0, "4096": 2.0}, {"256": "x", "4096": 1}, [1, 2], None]
)
def test_a_damaged_record_is_told(seconds, tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path))
    assert between_hosts.recalled(["a", "b"]) is None
    between_hosts.save(["a", "b"], {256: 1e-4, 1 << 20: 1e-2}, "2026-01-01")
    assert between_hosts.recalled(["b", "a"]) is not None
    (file,) = (tmp_path / "plans").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": seconds}))
    with pytest.raises(UserError, match="is damaged: remove it, and measure again"):
        between_hosts.recalled(["a", "b"])
