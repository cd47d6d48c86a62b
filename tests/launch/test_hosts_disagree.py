"""Two hosts that do not fit together: both say so in one sentence, and nothing is written."""

import shutil

import pytest

from tests.support.hosts import HOSTS, SPREAD, ended, on_host
from tests.support.processes import sentence
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.slow

TRAIN = ["train", *recipe_of("mnist"), "launch.timeout=60", *SPREAD, "--join", "--out", "run"]


def assert_both_say(processes, tmp_path, *parts: str) -> None:
    told = []
    for code, errors in map(ended, processes):
        assert code == 2, errors
        told.append(sentence(errors))
    assert told[0] == told[1]
    for part in parts:
        assert part in told[0]
    assert not (tmp_path / "run").exists()


def test_clocks_apart(hosts, tmp_path):
    if shutil.which("faketime") is None:
        pytest.skip("the command `faketime` is not installed")
    names, _ = hosts
    wrong = {"before": ("faketime", "-f", "+60s"), "env": {"DONT_FAKE_MONOTONIC": "1"}}
    processes = [on_host(names[0], tmp_path, *TRAIN), on_host(names[1], tmp_path, *TRAIN, **wrong)]
    assert_both_say(processes, tmp_path, f"the clocks of {HOSTS[1]} and {HOSTS[0]} are 60 s apart")


def test_different_versions_of_podium(hosts, tmp_path):
    names, _ = hosts
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import podium\npodium.__version__ = '99.0'\n")
    other = on_host(names[1], tmp_path, *TRAIN, env={"PYTHONPATH": str(site)}, before=())
    processes = [on_host(names[0], tmp_path, *TRAIN), other]
    assert_both_say(processes, tmp_path, "versions of Podium differ", f"99.0 on {HOSTS[1]} (instance 1)")


def test_different_recipes(hosts, tmp_path):
    names, _ = hosts
    processes = [on_host(name, tmp_path, *TRAIN, f"seed={seed}") for seed, name in enumerate(names)]
    assert_both_say(processes, tmp_path, "recipes differ", f"on {HOSTS[1]} (instance 1)")
