"""Curves are thinned to what a screen shows, and lose no spike."""

import numpy as np

from podium.report.curves import curves_of, kept_records
from podium.report.reading import find_runs, read_runs
from tests.support.made_runs import make_run


def test_few_records_are_all_kept():
    assert kept_records([np.arange(5.0)], 5, 5) == [0, 1, 2, 3, 4]


def test_of_many_records_first_last_and_every_spike_are_kept():
    values, other = np.sin(np.arange(100_000) / 900), np.full(100_000, np.nan)
    values[31_234], values[77_777], other[50_001] = 9.0, -9.0, 1.0
    kept = kept_records([values, other], 100_000, 400)
    assert {0, 99_999, 31_234, 77_777, 50_001} <= set(kept)
    assert len(kept) <= 400
    assert kept == sorted(kept)


def test_curves_have_what_was_recorded_and_nothing_that_cannot_be_drawn(tmp_path):
    make_run(tmp_path / "run", extra={"train/odd": 1e300, "topology/instances": 1.0, "valid/nan": float("nan")})
    (curves,) = curves_of(read_runs(find_runs([tmp_path]), AssertionError))
    valid, train = curves["parts"]
    assert valid["update"] == [20, 40, 60]
    assert valid["seconds"] == [10, 20, 30]
    assert valid["metrics"] == {"valid/loss": [1, 0.5, 0.25], "valid/nan": [None] * 3}
    assert train["metrics"]["train/odd"] == [None] * 6
    assert "topology/instances" not in train["metrics"]
    assert (curves["epoch"], curves["samples"]) == (0.05, 64)
