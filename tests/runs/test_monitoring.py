"""What a training writes about itself and its machine while it trains."""

import json
import time

import pytest

from podium.errors import Interrupted
from podium.machine.usage import FIGURES, UsageMeter
from podium.recipe.loading import load_recipe
from podium.runs import monitoring
from podium.runs.folder import Run
from podium.runs.live import instance_file, read_instances
from podium.train import resume, train
from podium.training.stop_request import StopRequest
from tests.support.recipes import TINY


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Run:
    """A run of a fraction of a second, with a reading every few milliseconds."""
    name, *overrides = TINY["mnist"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitoring.Monitoring.__init__, "__defaults__", (0.005,))
        return train(load_recipe(name, [*overrides, "engine.updates_per_call=1"]), tmp_path_factory.mktemp("a") / "run")


def test_records_have_each_reading_once(watched):
    readings = [record for record in watched.records() if "system/cpu_percent" in record]
    assert readings
    assert len(readings) < len(watched.records())
    assert {name.removeprefix("system/") for name in readings[-1] if name.startswith("system/")} <= set(FIGURES)


def test_the_summary_has_means_and_says_what_is_unknown(watched):
    system = watched.summary(whole=True)["system"]
    assert system["mean"].keys() == system["most"].keys()
    assert all(system["mean"][name] <= most for name, most in system["most"].items())
    assert system["mean"].keys() | system["unknown"].keys() >= set(FIGURES) - {"energy_j", "accelerator_energy_j"}
    assert "energy" in watched.summary() or "energy_j" in system["unknown"]


def test_the_file_of_an_instance_says_how_it_ended(watched):
    (state,) = read_instances(watched)
    assert (state.instance, state.instances, state.ended) == (0, 1, True)
    assert state.update == state.total_updates == watched.summary()["updates"]
    assert 0 <= state.window.share("train") <= 1
    assert state.number > 1


def test_files_of_instances_that_are_no_more_go_and_those_of_others_stay_as_they_are(tmp_path, monkeypatch):
    name, *overrides = TINY["mnist"]
    run, before = Run(tmp_path / "run"), monitoring.Monitoring.__enter__

    def enter(watching):
        run.monitor.mkdir()
        for index in (1, 12):
            instance_file(run, index).write_text("{}")
        return before(watching)

    def leave(watching, *error):  # as the last thing, once another process has this number
        leave_before(watching, *error)
        instance_file(run, 0).write_text('{"pid": 1}')
        watching._write(ended=True)

    leave_before = monitoring.Monitoring.__exit__
    monkeypatch.setattr(monitoring.Monitoring, "__enter__", enter)
    monkeypatch.setattr(monitoring.Monitoring, "__exit__", leave)
    train(load_recipe(name, [*overrides, "train.length=2up"]), run.path)
    assert [path.name for path in run.monitor.iterdir()] == ["instance-0.json"]
    assert instance_file(run, 0).read_text() == '{"pid": 1}'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"instance": 0}',
        b"\xff" * 100,
        b"[" * 70000,
        b'{"a":' * 90 + b"1" + b"}" * 90,
    ],
)
def test_files_that_are_something_else_are_left_out(text, watched, tmp_path):
    run = Run(tmp_path)
    run.monitor.mkdir()
    instance_file(run, 0).write_bytes(text)
    good = json.loads(instance_file(watched, 0).read_text())
    instance_file(run, 1).write_text(json.dumps(good | {"instance": 1, "instances": 2}))
    instance_file(run, 7).write_text(json.dumps(good | {"instance": 7, "instances": 8}))  # of earlier instances
    (run.monitor / "instance-x.json").write_text("{}")
    assert [state.instance for state in read_instances(run)] == [1]
    bad = good | {"window": good["window"] | {"seconds": float("nan")}}
    instance_file(run, 1).write_text(json.dumps(bad | {"instance": 1}))
    assert [state.instance for state in read_instances(run)] == [7]


def test_without_monitoring_nothing_is_measured(tmp_path):
    name, *overrides = TINY["mnist"]
    run = train(load_recipe(name, [*overrides, "log.monitor=false"]), tmp_path / "run")
    assert not run.monitor.exists()
    assert "system" not in run.summary(whole=True)


def test_a_folder_that_takes_no_file_costs_one_warning(tmp_path, monkeypatch, capfd):
    name, *overrides = TINY["mnist"]
    monkeypatch.setattr(monitoring.Monitoring.__init__, "__defaults__", (0.005,))
    monkeypatch.setattr(Run, "monitor", tmp_path / "file")
    (tmp_path / "file").write_text("in the way")
    run = train(load_recipe(name, overrides), tmp_path / "run")
    assert run.summary()["state"] == "done"
    assert capfd.readouterr().err.count("without what `podium monitor` shows") == 1


def test_energy_goes_into_the_summary_and_on_counting_after_a_resume(tmp_path, monkeypatch):
    """The counters are made up, and as large as the seconds that have passed."""
    counter = tmp_path / "powercap" / "intel-rapl:0"
    counter.mkdir(parents=True)
    (counter / "name").write_text("package-0")
    read = UsageMeter.read
    began = time.monotonic()

    def go_on() -> None:
        (counter / "energy_uj").write_text(str(int(1e6 * (time.monotonic() - began))))

    def build(**keys) -> UsageMeter:
        go_on()
        return UsageMeter(powercap=tmp_path / "powercap", **keys)

    monkeypatch.setattr(monitoring, "UsageMeter", build)
    monkeypatch.setattr(UsageMeter, "read", lambda meter: (go_on(), read(meter))[1])
    monkeypatch.setattr(monitoring.Monitoring.__init__, "__defaults__", (0.005,))
    name, *overrides = TINY["mnist"]
    stop = StopRequest()
    stop.after = lambda update: "a test" if update >= 5 else None
    with pytest.raises(Interrupted):
        train(load_recipe(name, overrides), tmp_path / "run", stop=stop)
    run = Run(tmp_path / "run")
    first = run.summary()["energy"]
    assert 0 < first["processor_j"] <= first["measured_s"] + 0.1
    assert run.summary()["system"]["mean"]["power_w"] > 0
    resume(run)
    both = run.summary(whole=True)["energy"]
    assert first["processor_j"] < both["processor_j"] <= both["measured_s"] + 0.2
    assert both["measured_s"] <= run.summary()["seconds"]["total"] + 0.1
