"""Networks: presets and given ones, and the load of the reduction as it really is."""

import pytest

from podium.distributed.instances import Instances
from podium.distributed.reduction.exact import BUCKET_BYTES, FIRST_BYTES
from podium.distributed.reduction.exchange import Exchange
from podium.errors import UserError
from podium.plan.network import PRESETS, Network, buckets, fitted, parse_network, reduction_load


def test_every_preset_names_its_source_and_what_is_reached():
    for name, network in PRESETS.items():
        assert parse_network(name) == network
        assert len(network.source) > 10
        assert 0 < network.reached[0] < network.reached[1] <= 1


def test_a_network_is_given_as_latency_and_rate():
    found = parse_network("20us,10Gb")
    assert found.latency_s == pytest.approx(20e-6)
    assert found.bytes_per_second == pytest.approx(1.25e9)


@pytest.mark.parametrize("text", ["", "fast", "10Gb", "20us", "20us,0Gb", "1e9us,1Gb", "20us,10Gb,3", "nanus,1Gb"])
def test_anything_else_is_refused_with_the_presets(text):
    with pytest.raises(UserError, match=r"expected latency and gigabits per second, such as 20us,10Gb, or one of eth"):
        parse_network(text)


def test_gradients_are_divided_into_buckets_as_the_reduction_divides_them():
    assert buckets(100) == [100]
    assert buckets(FIRST_BYTES + BUCKET_BYTES + 5) == [FIRST_BYTES, BUCKET_BYTES, 5]


def test_long_buckets_send_twice_their_bytes_and_short_ones_one_round_for_each_doubling():
    assert reduction_load(10**6, Exchange(4, (4,))) == (0.0, 0.0)
    sixteen = Exchange(16, (1,) * 16)
    rounds, sent = reduction_load(1000, sixteen)
    assert (rounds, sent) == (4, 4000)
    rounds, sent = reduction_load(64 << 20, sixteen)
    assert sent == pytest.approx(2 * (1 - 1 / 16) * (64 << 20))
    assert rounds == 2 * 4 * len(buckets(64 << 20)) / 2


def test_hosts_that_are_not_alike_send_everything_in_two_rounds():
    rounds, sent = reduction_load(64 << 20, Exchange(8, (1, 3)))
    assert rounds == 2 * len(buckets(64 << 20)) / 2
    assert sent == pytest.approx(64 << 20)  # one sends all that it has, the other, which owns all, the totals
    assert reduction_load(64 << 20, Exchange(8, (1,) * 3))[1] == pytest.approx(2 * (64 << 20))


def test_latency_and_bandwidth_are_found_again_from_times_of_sums():
    true = Network(30e-6, 1e9, (1, 1), "")
    sizes = (4096, 1 << 20, 16 << 20)
    times = {}
    for size in sizes:
        rounds, sent = (2, 2 * size) if Instances.doubling_pays(size, 4) else (4, 1.5 * size)
        times[size] = rounds * true.latency_s + sent / true.bytes_per_second
    found = fitted(times, 4)
    assert found.bytes_per_second == pytest.approx(1e9, rel=1e-6)
    assert found.latency_s == pytest.approx(30e-6, rel=1e-6)
