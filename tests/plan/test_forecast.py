"""Forecasts: what was measured is followed, and every part that makes a training slower makes the forecast slower."""

from dataclasses import replace

import pytest

from podium.plan.components import Components, HostTimes
from podium.plan.forecast import Shape, changes, forecast
from podium.plan.network import PRESETS, Network

PARTS = Components(
    measured="2026-01-01", num_cores=2, threads=1,
    times={
        1: HostTimes(0.010, 0.008, 0.01, 0.010, 0.008, 1.0, 0.01),
        2: HostTimes(0.012, 0.009, 0.01, 0.0115, 0.009, 1.2, 0.02),
    },
    crowded=HostTimes(0.025, 0.018, 0.01, 0.0122, 0.0088, 2.4, 0.04),
    jitter=0.05, gradient_bytes=8 << 20, memory_bytes=10**9, valid_s=1e-4, save_s=0.01,
    num_samples=10**6, num_valid_samples=1000,
)  # fmt: skip
ALONE = Shape(1, 1, 1, 64, 1, 1000, 500, 2, 2)
SLOW, FAST = PRESETS["ethernet-1g"], Network(1e-6, 1e12, (1.0, 1.0), "")


def on(instances: int, hosts: int, **changed: int) -> Shape:
    return replace(ALONE, num_replicas=instances, num_instances=instances, num_hosts=hosts, **changed)


@pytest.mark.parametrize(("instances", "first_s", "pass_s"), [(1, 0.010, 0.008), (2, 0.012, 0.009)])
def test_what_was_measured_on_a_host_is_predicted_for_it(instances, first_s, pass_s):
    for accumulation in (1, 4):
        found = forecast(PARTS, on(instances, 1, num_accumulation=accumulation), None)
        assert found.update_s.value == pytest.approx(first_s + (accumulation - 1) * pass_s, rel=0.02)
        assert found.samples_per_second.value == pytest.approx(
            64 * accumulation * instances / found.update_s.value, rel=0.01
        )


def test_replicas_of_one_instance_run_one_after_another():
    found = forecast(PARTS, replace(ALONE, num_replicas=4), None)
    assert found.update_s.value == pytest.approx(0.010 + 3 * 0.008, rel=0.02)


def test_instances_beyond_the_cores_share_them():
    two, four, eight = (forecast(PARTS, on(count, 1), None) for count in (2, 4, 8))
    # Passes take turns (0.0088 against 0.008 alone), updates cost more beside them, and meetings wait.
    busy_s = 0.009 * 0.0088 / 0.008 + 0.0025 + 1.1 * (0.0034 - 0.002)
    waited_s = (0.025 - 2 * 0.0122) + (0.012 - 0.0115)
    assert four.update_s.value == pytest.approx(2 * busy_s + waited_s, rel=0.02)
    rates = [one.samples_per_second for one in (two, four, eight)]
    assert rates[0].value > rates[1].value > rates[2].value
    assert rates[1].high / rates[1].low > rates[0].high / rates[0].low


def test_without_a_measurement_of_turns_the_interval_is_wider():
    known, unknown = (forecast(replace(PARTS, crowded=c), on(4, 1), None).update_s for c in (PARTS.crowded, None))
    assert unknown.high / unknown.low > known.high / known.low


def test_the_share_of_communication_is_as_uncertain_as_the_times_that_it_is_of():
    one, two = (forecast(PARTS, on(count, 1), None).communication for count in (1, 2))
    assert one.listed() == [0, 0, 0]
    assert two.low < two.value - 0.02
    assert two.high > two.value + 0.02


def test_a_slower_network_and_more_hosts_take_longer():
    seconds = [
        forecast(PARTS, on(count, count), network).update_s.value
        for network, count in ((FAST, 16), (SLOW, 16), (SLOW, 256))
    ]
    assert seconds == sorted(seconds)
    assert forecast(PARTS, on(16, 16), SLOW).communication.value > 0.5


def test_waiting_for_the_slowest_grows_with_jitter_and_instances():
    calm = forecast(replace(PARTS, jitter=0.0), on(256, 256), FAST).update_s.value
    some, many = (forecast(PARTS, on(count, count), FAST).update_s.value for count in (16, 256))
    assert calm < some < many


def test_the_end_counts_validations_checkpoints_and_the_start():
    found = forecast(PARTS, ALONE, None)
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(1000 * 0.010 + 2 * 1000 * 1e-4 + 2 * 0.01 + 1.0 + 0.01, rel=0.02)
    assert found.device_hours is not None
    assert found.device_hours.value == pytest.approx(found.total_s.value / 3600, rel=0.01)
    assert forecast(PARTS, replace(ALONE, total_updates=0), None).total_s is None


def test_memory_grows_by_the_sums_of_several_replicas_and_instances():
    def memory(shape: Shape) -> float:
        found = forecast(PARTS, shape, None).memory_bytes
        assert found is not None
        return found.value

    assert memory(ALONE) == pytest.approx(1e9, rel=0.01)
    assert memory(replace(ALONE, num_replicas=4)) - memory(ALONE) == pytest.approx(2 * PARTS.gradient_bytes, rel=0.01)
    assert memory(on(2, 1)) - memory(ALONE) == pytest.approx(PARTS.gradient_bytes, rel=0.01)
    assert forecast(replace(PARTS, memory_bytes=None), ALONE, None).memory_bytes is None


def test_accumulation_helps_where_communication_takes_most():
    found = changes(PARTS, on(16, 16), SLOW, per_host_most=2)
    assert found == sorted(found, key=lambda change: -change.forecast.samples_per_second.value)
    words = " ".join(change.what for change in found)
    assert all(word in words for word in ("accumulation 2", "micro-batch 128", "8 instances", "hidden"))
    gains = {change.what.split()[0]: change.forecast.samples_per_second.value for change in found}
    assert gains["accumulation"] > 1.3 * forecast(PARTS, on(16, 16), SLOW).samples_per_second.value
