"""`podium runs`, `compare`, `report` and `board`: what they print, their exit codes, and that nobody else is served."""

import csv
import io
import json
import re
import signal
import subprocess
import time
import urllib.request

import psutil
import pytest

from podium.study.folder import StudyFolder
from tests.support.made_runs import make_run
from tests.support.processes import podium_command, podium_here
from tests.support.studies import PretendedRuns, conducted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "runs"
    make_run(folder / "slow", ["optim.lr=1e-3"], losses=[1.0, 0.3], rate=100)
    make_run(folder / "fast", ["optim.lr=2e-3"], losses=[1.0, 0.2], rate=300)
    make_run(folder / "same", ["optim.lr=2e-3"], losses=[1.0, 0.2], rate=200, weights="ab" * 32, energy_j=7200.0)
    make_run(folder / "other", ["optim.lr=4e-3"], losses=[1.0, 0.4], weights="ef" * 32, state="failed")
    return folder


def test_runs_are_listed_and_sorted(folder):
    def names(*options: str) -> list[str]:
        done = podium_here("runs", folder, "--json", *options)
        assert done.returncode == 0, done.stderr
        return [row["run"] for row in json.loads(done.stdout)]

    assert names() == ["fast", "other", "same", "slow"]
    assert names("--sort", "best") == ["fast", "same", "slow", "other"]
    assert names("--sort", "rate")[0] == "other"
    assert names("--sort", "state")[-1] == "other"
    table = podium_here("runs", folder).stdout
    for shown in ("best valid/loss", "failed", "40/40", "4 runs in"):
        assert shown in table
    (first, *_) = csv.DictReader(io.StringIO(podium_here("runs", folder, "--csv").stdout))
    assert (first["run"], first["best"], first["samples_per_second"]) == ("fast", "0.2", "300.0")


def test_a_damaged_run_is_listed_as_such(tmp_path):
    make_run(tmp_path / "good")
    (make_run(tmp_path / "bad") / "summary.json").write_text("[")
    done = podium_here("runs", tmp_path)
    assert done.returncode == 0
    assert "damaged" in done.stdout
    assert "it is not JSON" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs", "nowhere"], "nowhere does not exist"),
        (["runs", "{}", "--sort", "size"], "--sort size: expected one of name, state, best, rate, age"),
        (["compare", "{}/none"], "does not exist"),
        (["report", "{}", "--target", "valid/loss"], "expected a metric and a value"),
        (["report", "{}", "--out", "{}/no/where.html"], "does not exist"),
        (["report", "{}", "--out", "{}"], "is a folder"),
    ],
)
def test_mistakes_are_one_sentence(folder, words, said):
    done = podium_here(*(word.format(folder) for word in words))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_runs_are_compared_in_columns_or_in_rows(folder):
    few = podium_here("compare", folder / "slow", folder / "fast", folder / "same").stdout
    assert re.search(r"optim\.lr\W+0\.001\W+0\.002\W+0\.002", few)
    assert re.search(r"energy\W+unknown\W+unknown\W+7\.2 kJ", few)
    assert "the weights of all are the same to the bit" in few
    trees = json.loads(podium_here("compare", folder, "--json").stdout)
    assert {tree["run"]: tree["best"] for tree in trees} == {"fast": 0.2, "other": 0.4, "same": 0.2, "slow": 0.3}
    assert trees[0]["recipe"]["optim.lr"] == 0.002
    make_run(folder / "later" / "fifth")
    many = podium_here("compare", folder).stdout
    assert "the weights of fast, fifth, same, slow are the same to the bit" in " ".join(many.split())


def test_a_report_says_what_a_target_took(folder, tmp_path):
    done = podium_here("report", folder, "--target", "valid/loss=0.25", "--out", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert "not reached" in done.stdout
    assert "1 replica with a global batch of 64, optim.lr 0.002: valid/loss ≤ 0.25 in 20 s" in done.stderr
    assert (tmp_path / "r.html").stat().st_size < 3_000_000


def test_the_report_of_a_study_has_its_target_and_what_it_was_started_with(tmp_path):
    study: StudyFolder
    study, _ = conducted(tmp_path / "study", PretendedRuns(4), values={"optim.lr": [1e-3, 2e-3]}, seeds=2, target=0.3)
    done = podium_here("report", study.path)
    assert done.returncode == 0, done.stderr
    assert "reached, but the records of these runs do not say when" in done.stderr
    html = (study.path / "report.html").read_text()
    assert "Time to valid/loss ≤ 0.3" in html
    assert "study by grid of valid/loss" in html
    data = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])
    assert [run["state"] for run in data["runs"]] == ["finished"] * 4
    assert data["keys"][0] == "optim.lr"


@pytest.mark.slow
def test_the_board_is_served_on_loopback_only_with_hyper_parameters(folder, tmp_path):
    process = subprocess.Popen(
        podium_command("board", folder / "slow", folder / "fast", "--port", "0"), cwd=tmp_path, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        printed = re.compile(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/")  # with its token
        address = next(found[0] for line in process.stderr if (found := printed.search(line)))
        served = psutil.Process(process.pid).children(recursive=True)
        listening = [one.laddr.ip for child in served for one in child.net_connections() if one.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        asked = {"startIndex": 0, "sliceSize": 9, "colParams": [], "allowedStatuses": ["STATUS_UNKNOWN"]}
        request = urllib.request.Request(
            f"{address}experiment/x/data/plugin/hparams/session_groups", json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        groups: list[dict] = []
        deadline = time.monotonic() + 60
        while len(groups) < 2 and time.monotonic() < deadline:  # it reads the files after it has begun to listen
            with urllib.request.urlopen(request, timeout=30) as answer:
                groups = json.load(answer)["sessionGroups"]
            time.sleep(0.2)
        assert sorted(group["hparams"]["optim.lr"] for group in groups) == [1e-3, 2e-3]
        assert all(any(one["name"]["tag"] == "valid/loss" for one in group["metricValues"]) for group in groups)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in served)
