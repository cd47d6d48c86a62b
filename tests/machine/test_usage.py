"""How busy the machine is. RAPL and NVML are stand-ins here: a made-up folder of counters, a made-up library."""

import re
import time
import types
from pathlib import Path

import pytest
import torch

from podium.machine.accelerator import FIGURES as ACCELERATOR_FIGURES
from podium.machine.accelerator import Accelerator, OtherAccelerator, accelerator_of
from podium.machine.energy import ProcessorEnergy
from podium.machine.usage import FIGURES, HOST_FIGURES, UsageMeter


def zone(root: Path, folder: str, name: str, energy_uj: int, range_uj: int | None = 1_000_000_000) -> Path:
    """One of the system's folders of counters, made up."""
    (root / folder).mkdir(parents=True)
    (root / folder / "name").write_text(f"{name}\n")
    (root / folder / "energy_uj").write_text(f"{energy_uj}\n")
    if range_uj is not None:
        (root / folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return root / folder


def test_energy_is_that_of_packages_and_their_memory_and_nothing_twice(tmp_path):
    packages = [zone(tmp_path, f"intel-rapl:{n}", f"package-{n}", 5_000_000) for n in range(2)]
    memory = zone(tmp_path, "intel-rapl:0:2", "dram", 7)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 7)  # a part of the package
    psys = zone(tmp_path, "intel-rapl:2", "psys", 7)  # all of them again
    again = zone(tmp_path, "intel-rapl-mmio:0", "package-0", 7)  # the same package, read another way
    energy = ProcessorEnergy(tmp_path)
    for folder, more in [(packages[0], 3_000_000), (packages[1], 1_000_000), (memory, 500_000)]:
        counter = folder / "energy_uj"
        counter.write_text(str(int(counter.read_text()) + more))
    for folder in (cores, psys, again):
        (folder / "energy_uj").write_text("99000000")
    assert energy.joules() == pytest.approx(4.5)
    assert energy.unknown == ""


def test_a_counter_that_began_again_goes_on_from_its_range(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000) / "energy_uj"
    energy = ProcessorEnergy(tmp_path)
    counter.write_text("2000000")
    assert energy.joules() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda counter: counter.unlink(), "can no longer be read"),
        (lambda counter: counter.write_text("much"), "can no longer be read"),
        (lambda counter: counter.write_text("1"), "can no longer be read"),  # without a range
    ],
    ids=["gone", "no number", "went back"],
)
def test_energy_that_can_no_longer_be_measured_is_unknown_for_good(spoil, reason, tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000, range_uj=None) / "energy_uj"
    energy = ProcessorEnergy(tmp_path)
    spoil(counter)
    assert energy.joules() is None
    assert reason in energy.unknown
    counter.write_text("6000000")
    assert energy.joules() is None


def test_counters_that_were_not_read_for_long_may_have_begun_again_twice(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    now = [0.0]
    energy = ProcessorEnergy(tmp_path, clock=lambda: now[0])
    now[0] = 150.0
    assert energy.joules() == 0
    now[0] = 400.0
    assert energy.joules() is None
    assert "not read for 250 s" in energy.unknown


def test_a_machine_without_counters_says_so(tmp_path):
    assert "offers no energy counters" in ProcessorEnergy(tmp_path / "nowhere").unknown
    assert ProcessorEnergy(tmp_path).joules() is None


class Refused(Exception):
    """An error of the library."""


class Library(types.SimpleNamespace):
    """A stand-in for pynvml: a device with counters that a test sets."""

    def __init__(self, refuses: tuple[str, ...] = ()) -> None:
        super().__init__(asked=b"", energy_mj=5_000, refuses=refuses)

    def _answer(self, name, value):
        if name in self.refuses:
            raise Refused("Not Supported")
        return value

    def nvmlInit(self):  # noqa: N802
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked = uuid
        return "device"

    def nvmlDeviceGetUtilizationRates(self, device):  # noqa: N802
        return self._answer("use", types.SimpleNamespace(gpu=87))

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return self._answer("memory", types.SimpleNamespace(used=3 << 30))

    def nvmlDeviceGetPowerUsage(self, device):  # noqa: N802
        return self._answer("power", 250_500)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):  # noqa: N802
        return self._answer("energy", self.energy_mj)


def test_figures_of_an_accelerator():
    library = Library()
    accelerator = Accelerator("1234-abcd", library)
    accelerator.read()
    library.energy_mj += 12_500
    assert library.asked == b"GPU-1234-abcd"
    assert accelerator.read() == {
        "accelerator_percent": 87.0,
        "accelerator_memory_bytes": float(3 << 30),
        "accelerator_power_w": 250.5,
        "accelerator_energy_j": 12.5,
    }
    assert accelerator.unknown == {}


def test_what_an_accelerator_does_not_offer_is_unknown_and_the_rest_is_measured():
    accelerator = Accelerator("1234", Library(refuses=("power", "energy")))
    assert accelerator.read().keys() == {"accelerator_percent", "accelerator_memory_bytes"}
    assert accelerator.unknown == dict.fromkeys(
        ("accelerator_power_w", "accelerator_energy_j"), "NVML answers Not Supported"
    )


@pytest.mark.parametrize(
    ("accelerator", "reason"),
    [
        (lambda: Accelerator(None), "no accelerator that NVML knows"),
        (lambda: Accelerator("1234", Library(refuses=("init",))), "NVML answers Not Supported"),
        (lambda: Accelerator("1234"), r"nvidia-ml-py is not installed|NVML answers"),
    ],
    ids=["none", "no driver", "this machine"],
)
def test_without_an_accelerator_every_figure_has_its_reason(accelerator, reason):
    found = accelerator()
    assert found.read() == {}
    assert found.unknown.keys() == set(ACCELERATOR_FIGURES)
    assert all(re.search(reason, said) for said in found.unknown.values())


def test_every_figure_is_either_measured_or_unknown_with_a_reason(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj"
    meter = UsageMeter(powercap=tmp_path)
    began = time.perf_counter(), time.process_time()
    while time.process_time() - began[1] < 0.1:  # busy
        counter.write_text("4000000")
    used = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
    reading = meter.read()
    assert reading.values.keys() | reading.unknown.keys() == set(FIGURES)
    assert not reading.values.keys() & reading.unknown.keys()
    assert reading.values["energy_j"] == pytest.approx(4)
    assert reading.values["power_w"] > 0
    assert reading.values["process_cpu_percent"] == pytest.approx(100 * used, rel=0.3)
    assert 0 < reading.values["cpu_percent"] <= 100
    assert reading.values["process_memory_bytes"] > 1 << 20


def test_only_one_instance_of_a_host_measures_the_host():
    reading = UsageMeter(host=False).read()
    assert reading.values.keys() == {"process_cpu_percent", "process_memory_bytes"}
    assert {reading.unknown[name] for name in HOST_FIGURES} == {"the first instance of the host measures it"}


def test_a_system_that_keeps_things_to_itself_leaves_them_unknown(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("not in this container")

    for name in ("cpu_times", "disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(f"psutil.{name}", refuse)
    meter = UsageMeter()
    reading = meter.read()
    assert reading.values.keys() >= {"memory_bytes", "process_cpu_percent"}
    for name in ("cpu_percent", "disk_read_bytes_per_s", "network_sent_bytes_per_s"):
        assert reading.unknown[name] == "the system does not tell"


def other_maker(**questions):
    """A stand-in for torch's module of another maker's devices."""
    return types.SimpleNamespace(**questions)


def test_devices_of_other_makers_tell_through_torch():
    device = torch.device("xpu", 1)
    module = other_maker(
        mem_get_info=lambda which: ((3 + which.index) << 20, 10 << 20),
        utilization=lambda which: 40 + which.index,
        power_draw=lambda which: 250_000,
    )
    told = OtherAccelerator(device, module)
    assert told.read() == {
        "accelerator_percent": 41.0,
        "accelerator_memory_bytes": float(6 << 20),
        "accelerator_power_w": 250.0,
    }
    assert told.unknown == {"accelerator_energy_j": "torch does not tell it of xpu devices"}


def test_what_their_libraries_refuse_is_unknown_and_not_asked_again():
    asked = []

    def refuse(device):
        asked.append(device)
        raise Refused("amdsmi is not installed")

    told = OtherAccelerator(torch.device("cuda", 0), other_maker(utilization=refuse))
    assert told.read() == told.read() == {}
    assert len(asked) == 1
    assert told.unknown["accelerator_percent"] == "torch.cuda answers amdsmi is not installed"
    assert set(told.unknown) == set(ACCELERATOR_FIGURES)


def test_one_device_shares_its_memory_with_the_host():
    told = OtherAccelerator(torch.device("mps"), other_maker(driver_allocated_memory=lambda: 5 << 20))
    assert told.read() == {"accelerator_memory_bytes": float(5 << 20)}


def test_who_is_asked_about_a_device(monkeypatch):
    assert isinstance(accelerator_of(torch.device("cpu")), Accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="12-ab"))
    assert isinstance(accelerator_of(torch.device("cuda", 0)), Accelerator)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert isinstance(accelerator_of(torch.device("cuda", 0)), OtherAccelerator)
