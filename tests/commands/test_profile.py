"""`podium profile`: three rates that tell input and compute apart, and where the time of updates goes."""

import threading
from dataclasses import replace

import pytest

from podium.commands.profile import run_profile
from podium.data.source import Source
from podium.engine.update import Engine
from podium.errors import UserError
from podium.profiling.rates import Rates, measured_rates
from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from tests.support.recipes import TINY


class Clock:
    """Goes on by what is said to have taken time, wherever that happens."""

    def __init__(self) -> None:
        self._seconds, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        return self._seconds

    def go_on(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds


class Timed:
    """A source that takes its time over every block."""

    def __init__(self, source: Source, clock: Clock, seconds: float) -> None:
        self._source, self._clock, self._seconds = source, clock, seconds
        self.fields = source.fields

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, samples, out, places=None) -> None:
        self._clock.go_on(self._seconds)
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


@pytest.mark.parametrize(
    ("input_s", "update_s", "bottleneck"), [(0.05, 0.01, "input"), (0.01, 0.05, "compute")], ids=["input", "compute"]
)
def test_a_slow_source_is_told_from_a_slow_model(input_s, update_s, bottleneck, monkeypatch, one_thread):
    clock, update = Clock(), Engine.update
    monkeypatch.setattr(Engine, "update", lambda *args: (clock.go_on(update_s), update(*args)))
    name, *overrides = TINY["mnist"]
    training = build_training(load_recipe(name, [*overrides, "engine.updates_per_call=1"]))
    source = Timed(training.task.train_source, clock, input_s)
    training = replace(training, task=replace(training.task, train_source=source))
    # Long enough on this clock that the few blocks a feed gathers sooner or later than they are used do not count.
    found = measured_rates(training, seconds=10, clock=clock)
    assert found.bottleneck == bottleneck
    # Micro-batches of 8.
    assert found.input == pytest.approx(8 / input_s, rel=0.1)
    assert found.compute == pytest.approx(8 / update_s)
    assert found.both == pytest.approx(8 / (input_s + update_s), rel=0.1)  # this clock knows nothing of side by side


def test_every_workload_has_its_rates(tiny, capsys, one_thread):
    name, *overrides = tiny
    run_profile(name, overrides, rates_only=True, seconds=0.02)
    printed = capsys.readouterr().out
    for what in ("input only", "compute only", "both together", "bottleneck: "):
        assert what in printed
    assert "where the time goes" not in printed


@pytest.mark.parametrize(
    ("overrides", "trace", "out", "sentence"),
    [
        ([], "there.json", None, "there.json already exists"),
        ([], "nowhere/trace.json", None, "the folder .*nowhere does not exist"),
        ([], None, ".", "--out .* already exists"),
        (["parallel.stages=2"], None, None, "parallel.stages=1"),
        (["batch.replicas=1"], None, None, "2 instances on 1 host cannot carry 1 replica"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(overrides, trace, out, sentence, tmp_path):
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(UserError, match=sentence):
        run_profile("mnist", overrides, trace=trace and tmp_path / trace, out=out and tmp_path / out, instances=2)
    assert (tmp_path / "there.json").read_text() == "mine"
