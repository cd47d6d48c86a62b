"""`runs.jsonl`: the last line of a run counts, and what a kill leaves of a line does no harm."""

import pytest

from podium.errors import UserError
from podium.study.records import RecordLog, RunRecord, point_value, read_run_records


def record(number, **facts):
    return RunRecord(**{"number": number, "point": number, "state": "waiting", "values": {}, "seed": 1, **facts})


def test_the_newest_record_of_each_run_counts(tmp_path):
    log = RecordLog(tmp_path / "runs.jsonl")
    log.put(record(1), record(0))
    log.put(record(1, state="finished", value=0.1))
    found = read_run_records(tmp_path / "runs.jsonl")
    assert [(number, one.state) for number, one in found.items()] == [(0, "waiting"), (1, "finished")]
    assert found == dict(sorted(log.records.items()))


def test_a_line_that_a_kill_has_cut_short_is_not_there_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "runs.jsonl"
    RecordLog(path).put(record(0))
    with path.open("ab") as file:
        file.write(b'{"number": 1, "po')
    assert list(read_run_records(path)) == [0]
    RecordLog(path).put(record(2))
    assert list(read_run_records(path)) == [0, 2]


@pytest.mark.parametrize("line", ["{}", "[1]", "no", '{"number": -1}', '{"number": 1e999}'])
def test_a_line_that_is_no_record_is_named(line, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"line 1 is no record"):
        read_run_records(path)


def test_the_mean_over_seeds_waits_for_all_of_them():
    done = [record(0, state="finished", value=1.0), record(1, state="finished", value=2.0)]
    assert point_value(done) == 1.5
    assert point_value([*done, record(2)]) is None
