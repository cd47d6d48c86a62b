"""The network between hosts, as latency and bandwidth, and what the exact reduction costs on it.

A reduction between hosts goes bucket by bucket (`distributed/reduction/exact.py`), two lanes at a time. The instances
of a host each sum their slice of a bucket over the hosts at the same time, through the host's one network card: by
recursive doubling where the slice is short, else by halving and the mirrored gather. Where hosts or blocks of replicas
are not all alike, everything goes straight to who owns it, and back (`distributed/reduction/exchange.py`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podium.distributed.instances import Instances
from podium.distributed.reduction.exact import BUCKET_BYTES, FIRST_BYTES
from podium.distributed.reduction.exchange import Exchange
from podium.errors import UserError

_LANES = 2


@dataclass(frozen=True)
class Network:
    """What a host sends to another one: seconds until a short message arrives, bytes per second of long ones."""

    latency_s: float
    bytes_per_second: float
    #: what of the bandwidth programs get, at worst and at best: 1 where it was measured through Podium's own messages
    reached: tuple[float, float]
    #: where the numbers come from
    source: str


def _preset(gbit: float, latency_us: float, reached: tuple[float, float], source: str) -> Network:
    return Network(latency_us * 1e-6, gbit * 1e9 / 8, reached, source)


_TCP = "latency of MPI over TCP as measured with the OSU micro-benchmarks (25 µs)"
#: Rates are those of the standards. Messages go over TCP, also on InfiniBand, where it reaches least of the rate.
PRESETS: Mapping[str, Network] = {
    "ethernet-1g": _preset(1, 25, (0.85, 0.95), f"IEEE 802.3ab; {_TCP}"),
    "ethernet-10g": _preset(10, 25, (0.6, 0.95), f"IEEE 802.3ae; {_TCP}"),
    "ethernet-25g": _preset(25, 25, (0.4, 0.95), f"IEEE 802.3by; {_TCP}"),
    "ethernet-100g": _preset(100, 25, (0.2, 0.9), f"IEEE 802.3bj; {_TCP}"),
    "infiniband-edr": _preset(100, 25, (0.15, 0.6), f"InfiniBand EDR, four lanes, by TCP over InfiniBand; {_TCP}"),
    "infiniband-hdr": _preset(200, 25, (0.1, 0.5), f"InfiniBand HDR, four lanes, by TCP over InfiniBand; {_TCP}"),
    "infiniband-ndr": _preset(400, 25, (0.05, 0.4), f"InfiniBand NDR, four lanes, by TCP over InfiniBand; {_TCP}"),
}
_GIVEN = re.compile(r"(?P<latency>\d+(\.\d+)?)us,(?P<rate>\d+(\.\d+)?)Gb", re.IGNORECASE)


def parse_network(text: str) -> Network:
    """Return a preset, or the network of a text such as `20us,10Gb`; raise UserError if it is neither."""
    if text in PRESETS:
        return PRESETS[text]
    match = _GIVEN.fullmatch(text)
    if match is None or not 1e-3 <= float(match["rate"]) <= 1e6 or not float(match["latency"]) <= 1e7:
        raise UserError(
            f"--network {text}: expected latency and gigabits per second, such as 20us,10Gb, or one of "
            f"{', '.join(PRESETS)}"
        )
    return _preset(float(match["rate"]), float(match["latency"]), (0.8, 1.0), "as given with --network")


def buckets(num_bytes: int) -> list[int]:
    """Return the sizes of the buckets in which so many bytes of gradients are summed."""
    sizes, size = [], FIRST_BYTES
    while num_bytes > 0:
        sizes.append(min(size, num_bytes))
        num_bytes, size = num_bytes - size, BUCKET_BYTES
    return sizes


def sum_load(num_bytes: int, num_hosts: int, per_host: int = 1) -> tuple[float, float]:
    """Return (latencies one after another, bytes that a host sends) of one exact sum between hosts, whose instances
    each sum their slice. The one place that knows how `Instances.sum_exact` sends."""
    doublings = math.log2(num_hosts)
    if Instances.doubling_pays(num_bytes // per_host, num_hosts):
        return doublings, doublings * num_bytes
    return 2 * doublings, 2 * (1 - 1 / num_hosts) * num_bytes


def reduction_load(num_bytes: int, exchange: Exchange) -> tuple[float, float]:
    """Return (latencies one after another, bytes that a host sends) of one reduction between hosts."""
    num_hosts, per_host = len(exchange.hosts), max(exchange.host_sizes)
    if num_hosts == 1:
        return 0.0, 0.0
    sizes = buckets(num_bytes)
    if not exchange.is_even:  # two rounds, in which the busiest host sends or receives most
        return 2.0 * len(sizes) / min(_LANES, len(sizes)), exchange.busiest * num_bytes
    loads = [sum_load(size, num_hosts, per_host) for size in sizes]
    return sum(rounds for rounds, _ in loads) / min(_LANES, len(loads)), sum(sent for _, sent in loads)


def fitted(sizes: Mapping[int, float], num_hosts: int, source: str = "measured between the hosts") -> Network:
    """Return the network that explains the seconds of exact sums of so many bytes, one instance on each host."""
    loads, scale = np.array([sum_load(size, num_hosts) for size in sizes]), np.array(list(sizes.values()))
    (latency, per_byte), *_ = np.linalg.lstsq(loads / scale[:, None], np.ones(len(scale)), rcond=None)
    latency, per_byte = max(1e-7, float(latency)), max(1e-13, float(per_byte))
    return Network(latency, 1 / per_byte, (0.85, 1.1), source)
