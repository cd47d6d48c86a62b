"""How far a submitted run is: by its last complete record, which is newer than its summary."""

from pathlib import PurePosixPath

from podium.submit.progress import summary_of
from podium.submit.shell import Shell


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
