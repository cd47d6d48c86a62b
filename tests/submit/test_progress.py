"""How far a submitted run is: by its last complete record, which is newer than its summary."""

from pathlib import PurePosixPath

from podium.submit.progress import summary_of
from podium.submit.records import JobRecord, keep_job
from podium.submit.shell import Shell
from podium.submit.slurm.watch import status_of
from tests.support.processes import podium_here


def test_the_last_complete_record_says_how_far_a_run_is(tmp_path):
    folder = PurePosixPath(tmp_path)
    assert summary_of(Shell(), folder) == {}
    (tmp_path / "summary.json").write_text('{"state": "running", "updates": 20, "total_updates": 90}')
    assert summary_of(Shell(), folder)["updates"] == 20
    records = tmp_path / "metrics.jsonl"
    records.write_text('{"update": 30}\n{"update": 40}\n{"upda')
    assert summary_of(Shell(), folder) == {"state": "running", "updates": 40, "total_updates": 90}
    records.write_text('{"update": 30}\n[1]\n')
    assert summary_of(Shell(), folder)["updates"] == 30
    records.write_text('{"update": 10}\n')  # records of updates to be repeated were dropped
    assert summary_of(Shell(), folder)["updates"] == 20


def test_a_job_that_slurm_has_forgotten_is_what_its_run_says_or_cancelled():
    end = b'{"began": 1.0, "nodes": ["a"], "instances": 1}\n{"ended": 2.0, "code": 75}\n'
    interrupted, done = {"state": "interrupted"}, {"state": "done"}
    assert status_of([], interrupted, end).state == "interrupted"
    assert status_of([], interrupted, end, cancelled=True).state == "cancelled"
    assert status_of([], {}, b"", cancelled=True).state == "cancelled"
    assert status_of([], done, end, cancelled=True).state == "done"  # it was too late


def test_jobs_are_named_whole_in_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-study-of-" + "rates-" * 10 + "001"
    keep_job(JobRecord(name=name, target="slurm", kind="run", id="1234567", folder=str(tmp_path), site={},
                       submitted="2026-01-02T03:04:05+00:00", words=[]))  # fmt: skip
    shown = podium_here("jobs").stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert "".join(row[0] for row in rows) == name
    assert rows[0][1] == "slurm 1234567"
    assert rows[0][-1] == "01-02 03:04"
    assert "…" not in shown
