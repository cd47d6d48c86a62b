"""Tables of times: read in both forms, and refused in one sentence, with the line, where they are something else."""

import os

import pytest

from podium.errors import UserError
from podium.plan.tables import parse_table, read_table

GOOD = "devices,seconds_per_epoch\n1,8\n2,5\n4,3\n"


def test_seconds_and_rates_of_the_same_times_are_the_same_table():
    seconds = parse_table("devices,seconds_per_epoch\n1,4\n2,2\n4,1\n")
    rates = parse_table("# a comment\nGPUs, samples per second\n4,1\n1,0.25\n2,0.5\n")
    each = parse_table("devices,samples_per_second_per_device\n1,0.25\n2,0.25\n4,0.25\n")
    assert seconds.devices == rates.devices == each.devices == (1, 2, 4)
    assert seconds.seconds == rates.seconds == each.seconds


def test_repeated_counts_are_averaged():
    assert parse_table(GOOD + "4,5\n").seconds == (8.0, 5.0, 4.0)


def test_rows_up_to_a_count_are_a_table():
    assert parse_table(GOOD).up_to(2).devices == (1, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("a,b\n1,2\n", "must name a column `devices`"),
        ("devices,seconds,rate\n1,2,3\n", "must name a column `devices` and one of"),
        ("devices,seconds\n1,2\n2,1\n", "2 different counts of devices"),
        (GOOD + "0,3\n", "line 5: '0' is no number of devices"),
        (GOOD + "-1,3\n", "line 5: '-1' is no number of devices"),
        (GOOD + "9" * 5000 + ",3\n", "line 5: '9999"),
        (GOOD + "8,nan\n", "line 5: 'nan' is no time or rate"),
        (GOOD + "8,-1\n", "line 5: '-1' is no time or rate"),
        (GOOD + "8,1e999\n", "line 5: '1e999' is no time or rate"),
        (GOOD + "8\n", "line 5 has 1 columns, not 2"),
        (GOOD + '"8,1\n', "it is not CSV"),
        ("devices,seconds\n" + "1,2\n" * 2000, "more than 1000 lines"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(text, reason):
    with pytest.raises(ValueError) as caught:
        parse_table(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_or_too_long_are_refused(tmp_path):
    (tmp_path / "long.csv").write_bytes(GOOD.encode() + b"#" * (1 << 17))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.csv")
    for name, reason in {
        "long.csv": "more than", "bytes.csv": "not text in UTF-8", "pipe.csv": "named pipe", "none.csv": "no such file",
        ".": "folder",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=reason):
            read_table(tmp_path / name)
