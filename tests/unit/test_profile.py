"""`podium profile`: three rates that tell input and compute apart, and where the time of updates goes."""

import json
import time

import pytest

from podium.data.arrays import Source
from podium.errors import UserError
from podium.prepare import prepare
from podium.profile import Rates, measured_rates, operators_table, run_profile
from podium.recipe import load_recipe
from tests.conftest import TINY


class Slow:
    """A source that takes its time over every block."""

    def __init__(self, source: Source, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self.fields = source.fields

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, samples, out, places=None) -> None:
        time.sleep(self._seconds)
        self._source.gather(samples, out, places)


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ((100, 1000, 99), "input"),
        ((1000, 100, 99), "compute"),
        ((105, 100, 60), "input and compute alike"),
    ],
)
def test_the_slower_one_is_the_bottleneck(rates, named):
    found = Rates(*rates, global_batch=10)
    assert found.bottleneck == named
    assert found.table("").rows[2][1:] == [f"{rates[2]}", f"{10_000 / rates[2]:.4g}"]


def test_a_slow_source_is_told_from_a_slow_model(one_thread):
    name, *overrides = TINY["mnist"]
    prepared = prepare(load_recipe(name, [*overrides, "engine.updates_per_call=1"]))
    quick = measured_rates(prepared, seconds=0.1)
    assert quick.bottleneck == "compute"
    prepared.samples = Slow(prepared.samples, 0.05)
    slow = measured_rates(prepared, seconds=0.3)
    assert slow.bottleneck == "input"
    assert slow.input == pytest.approx(8 / 0.05, rel=0.3)  # a micro-batch of 8 every 50 ms
    assert slow.both < 1.3 * slow.input < slow.compute


def test_every_workload_has_its_rates(tiny, capsys, one_thread):
    name, *overrides = tiny
    run_profile(name, overrides, rates_only=True, seconds=0.02)
    printed = capsys.readouterr().out
    for what in ("input only", "compute only", "both together", "bottleneck: "):
        assert what in printed
    assert "where the time goes" not in printed


def test_operators_and_a_trace(tmp_path, one_thread):
    name, *overrides = TINY["mnist"]
    table = operators_table(prepare(load_recipe(name, overrides)), tmp_path / "trace.json")
    assert "ConvPool" in [row[0] for row in table.rows]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("overrides", "trace", "sentence"),
    [
        ([], "there.json", "there.json is there already"),
        ([], "nowhere/trace.json", "there is no folder .*nowhere"),
        (["parallel.stages=2"], None, "parallel.stages=1"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(overrides, trace, sentence, tmp_path):
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(UserError, match=sentence):
        run_profile("mnist", overrides, trace=trace and tmp_path / trace)
    assert (tmp_path / "there.json").read_text() == "mine"
