"""Where the time and the memory of updates go: what belongs to which module and kernel, how much work it was."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from podium.commands.profile import PAGE, TRACE, run_profile
from podium.machine.memory import peak_bytes
from podium.profiling.events import Place, Profiled, Spent, attribute, kernel_names, profile_updates
from podium.profiling.findings import layer_rows, operator_rows
from podium.profiling.memory import lasting_bytes, read_memory
from podium.profiling.peaks import Peaks, measure_peaks
from podium.profiling.stragglers import InstancesProfile, InstanceTimes
from podium.profiling.work import Work, count_work
from podium.recipe.loading import load_recipe
from podium.training.build import build_training
from podium.training.feeding import samples_of_updates
from tests.support.recipes import TINY


@pytest.fixture(scope="module")
def training():
    name, *overrides = TINY["mnist"]
    before = torch.get_num_threads()
    yield build_training(load_recipe(name, [*overrides, "engine.kernels=[conv_pool, winograd]"]))
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def profiled(training) -> Profiled:
    found = profile_updates(training)
    return attribute(found, training.state.model, torch.device("cpu"), kernel_names())


def test_time_is_that_of_modules_kernels_and_parts_of_an_update(profiled):
    assert profiled.num_updates == 5
    for way in ("forward", "backward"):
        for module in ("conv1.0", "conv2.0"):
            assert profiled.total_us(way, module, "conv_pool") > 0
        assert profiled.total_us(way, "hidden.1") > 0  # a linear layer, by torch
    assert profiled.total_us("optimiser") > 0
    total = sum(spent.us for spent in profiled.spent.values())
    assert total == pytest.approx(profiled.update_us, rel=0.2)  # nothing twice, little lost
    calls = {operator: spent.calls for (place, operator), spent in profiled.spent.items() if place.module == "hidden.1"}
    assert calls["aten::mm"] == pytest.approx(2)  # gradients of inputs and weights


def test_the_modules_are_called_as_ever_afterwards(profiled, training):
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not any(module._forward_hooks for module in training.state.model.modules())


def test_the_timeline_is_one_update(profiled):
    parts = [name for lane, name, *_ in profiled.timeline if lane == "part"]
    assert {"forward", "backward", "optimiser"} <= set(parts)
    assert all(0 <= start <= start + took <= 1.01 * profiled.timeline_us for *_, start, took in profiled.timeline)
    assert "conv_pool" in [name for lane, name, *_ in profiled.timeline if lane == "operator"]


def test_flops_are_those_of_the_plain_layers(training):
    with samples_of_updates(training, 0, 1) as samples:
        batch = {field: rows[0, 0] for field, rows in next(samples).items()}
    work = count_work(training.recipe, training.task.workload, batch)
    micro, (weight, *_) = training.recipe.batch.micro_batch, training.state.model.hidden[1].parameters()
    assert work["hidden.1"].forward_flops == 2 * micro * weight.numel()
    assert work["hidden.1"].backward_flops == 2 * work["hidden.1"].forward_flops
    assert work["conv1.0"].backward_flops == work["conv1.0"].forward_flops  # nobody needs the gradient of the images
    images, out = micro * 28 * 28, micro * 32 * 26 * 26
    assert work["conv1.0"].forward_flops == 2 * out * 9
    assert work["conv1.0"].forward_bytes == 4 * (images + 32 * 9 + 32 + out)


def test_the_flops_of_all_modules_are_those_that_torch_counts(tiny, one_thread):
    name, *overrides = tiny
    training = build_training(load_recipe(name, [*overrides, "engine.kernels=[few_rows]"]))
    task, model = training.task, training.state.model
    with samples_of_updates(training, 0, 1) as samples:
        batch = {field: rows[0, 0] for field, rows in next(samples).items()}
    work = count_work(training.recipe, task.workload, batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        task.workload.loss(model, batch).sum.backward()
    assert sum(one.flops for one in work.values()) == counter.get_total_flops() > 0
    assert all(one.forward_bytes > 0 for name, one in work.items() if not list(model.get_submodule(name).children()))


def test_the_flops_of_a_layer_are_those_of_the_operator_that_does_its_products():
    spent = {
        (Place("forward", "a", "winograd"), "winograd"): Spent(1000, 1),
        (Place("forward", "a"), "aten::copy_"): Spent(3000, 1),
        (Place("backward", "a", "winograd"), "winograd"): Spent(2000, 1),
        (Place("forward", "b"), "aten::addmm"): Spent(500, 1),
        (Place("optimiser"), "aten::_fused_adamw_"): Spent(100, 1),
    }
    profiled, work = Profiled(1, 6600, spent), {"a": Work(3e9, 6e9, 100, 200), "b": Work(1e9, 0, 50, 0)}
    rows = {row.name: row for row in operator_rows(profiled, work, passes=2)}
    assert (rows["winograd"].flops, rows["winograd"].ms, rows["winograd"].kernel) == (18e9, 3, True)
    assert (rows["aten::addmm"].flops, rows["aten::copy_"].flops) == (2e9, 0)
    layer = next(row for row in layer_rows(profiled, work, passes=2) if row.name == "a")
    assert (layer.ms, layer.flops, layer.intensity) == (6, 18e9, 3e7)
    assert layer.flops_per_second == pytest.approx(18e9 / 6e-3)


def test_memory_by_kind_and_its_peak(training, tmp_path):
    profile_updates(training, tmp_path / "trace.json", memory=True)
    lasting = lasting_bytes(training)
    memory = read_memory(tmp_path / "trace.json", lasting, peak_bytes())
    weights = sum(param.numel() * 4 for param in training.state.model.parameters())
    assert memory.peak["weights"] == lasting["weights"] == weights
    # All gradients are there at the end of the backward pass, and none at the end of the update.
    assert max(memory.bytes["gradients"]) == pytest.approx(weights, rel=0.05)
    assert memory.bytes["gradients"][-1] < 0.05 * weights
    assert max(memory.bytes["activations"]) > memory.bytes["activations"][-1] >= 0
    sums = [sum(memory.bytes[kind][k] for kind in memory.bytes) for k in range(len(memory.times))]
    assert memory.peak_bytes == max(sums)
    assert memory.largest[0].bytes == max(block.bytes for block in memory.largest)
    assert {span.name for span in memory.parts} >= {"forward", "backward", "optimiser"}


def test_memory_of_a_trace_made_by_hand(tmp_path):
    def span(name: str, start: float, end: float) -> dict:
        return {"name": name, "ts": start, "dur": end - start}

    def mark(at: float, size: int, address: int) -> dict:
        return {"name": "[memory]", "ts": at, "args": {"Bytes": size, "Addr": address}}

    events = [
        span("podium part: update", 100, 200),
        span("podium part: forward", 110, 140),
        span("podium module: a", 110, 130),
        span("aten::addmm", 112, 128),
        span("podium part: backward", 150, 180),
        mark(90, 999, 9), mark(95, -999, 9),  # before the update
        mark(115, 4096, 1), mark(116, 2048, 2), mark(120, -2048, 2), mark(170, -4096, 1),
        mark(160, 1024, 2), mark(190, -1024, 2),
        {"name": "process_name", "ph": "M"},
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    memory = read_memory(tmp_path / "trace.json", {"weights": 10, "optimiser": 0, "input": 5}, None)
    assert memory.peak == {
        "weights": 10, "optimiser": 0, "input": 5, "activations": 4096, "gradients": 0, "temporary": 2048,
    }  # fmt: skip
    assert [(block.kind, block.operator, block.module, block.bytes) for block in memory.largest] == [
        ("activations", "aten::addmm", "a", 4096), ("temporary", "aten::addmm", "a", 2048),
    ]  # fmt: skip
    assert max(memory.bytes["gradients"]) == 1024


def test_the_slowest_instance_is_the_one_that_others_wait_for():
    def times(index: int, update: float, waits: float) -> InstanceTimes:
        return InstanceTimes(index, update, waits, update, 10.0)

    found = InstancesProfile(100, [times(0, 50, 20), times(1, 50, 2), times(2, 50, 15)])
    assert found.straggler.index == 1
    assert found.sentence() == ("the others wait for instance 1: its own work takes 60% longer than that of instance 0")
    assert found.instances[1].hidden == pytest.approx(0.8)
    assert found.instances[0].hidden == 0
    assert "nobody waits" in InstancesProfile(100, [times(0, 50, 5), times(1, 50, 6)]).sentence()


@pytest.mark.slow
def test_peaks_are_measured(one_thread):
    peaks = measure_peaks(torch.device("cpu"))
    assert 1e9 < peaks.bytes_per_second < peaks.flops_per_second < 1e14
    assert Peaks(100, 20).ridge == 5


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The page of a tiny recipe on two instances, as the command writes it."""
    name, *overrides = TINY["mnist"]
    folder = tmp_path_factory.mktemp("pages")
    run_profile(name, [*overrides, "batch.replicas=2"], seconds=0.05, out=folder / "new", instances=2)
    return folder / "new"


@pytest.mark.slow
def test_the_command_writes_a_page_and_a_trace_beside_it(pages):
    assert {path.name for path in pages.iterdir()} == {PAGE, TRACE}
    assert json.loads((pages / TRACE).read_text())["traceEvents"]
    html = (pages / PAGE).read_text()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_the_page_in_a_browser(width, dark, pages, open_page, tmp_path):
    page = open_page(pages / PAGE, width=width, dark=dark)
    page.evaluate("for (const plot of Podium.plots) plot.show()")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    operators = page.locator("#operators").inner_text()
    assert "conv_pool" in operators
    assert "Podium" in operators
    assert page.locator("#instances tr").count() == 2
    assert page.locator("#memory polygon").count() == 6
    assert page.locator("#roofline h3").inner_text() == "GFLOP/s"
    assert page.locator("#roofline canvas").count() >= 1
    bars = page.locator("#timeline rect").count()
    page.locator("#timeline").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert 0 < page.locator("#timeline rect").count() < bars
    page.keyboard.press("0")
    assert page.locator("#timeline rect").count() == bars
    page.screenshot(path=tmp_path / "page.png", full_page=True)
