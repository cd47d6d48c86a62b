"""Who joins which part of a sum, where blocks of replicas are of different sizes or hosts have different numbers of
instances. Pure: `summed_buffers.py` carries it out.

    every instance owns a slice of each buffer: it joins all subtrees there, in the tree's order
    on its host it reads the subtrees of the others in shared memory; the other hosts send theirs
    for each slice, one instance of every other host (its *helper*) sends what the host has, and receives the total

A host sends the largest subtrees of all its instances together. Hosts with many of them own more: what they own they
need not send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from podium.replica_tree import Join, deal, join_order, subtrees

#: slices start at multiples of this many elements
_ALIGNMENT = 16


@dataclass(frozen=True)
class Exchange:
    """Instances that carry the blocks of `deal`, in order, and how many consecutive ones share memory."""

    num_replicas: int
    host_sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.host_sizes)

    @property
    def is_even(self) -> bool:
        """Whether all instances and hosts are alike: then halves, quarters and so on are exchanged (`sum_exact`)."""
        return self.count & (self.count - 1) == 0 and len(set(self.host_sizes)) == 1

    @cached_property
    def subtrees(self) -> list[list[range]]:
        """The subtrees that each instance adds up."""
        return [subtrees(block, self.num_replicas) for block in deal(self.num_replicas, self.count)]

    @cached_property
    def hosts(self) -> list[range]:
        """The instances of each host."""
        return [
            range(stop - size, stop) for size, stop in zip(self.host_sizes, accumulate(self.host_sizes), strict=True)
        ]

    def host_of(self, instance: int) -> int:
        return next(host for host, instances in enumerate(self.hosts) if instance in instances)

    def on_host(self, host: int) -> list[range]:
        """Return the subtrees that the instances of a host have in memory, in order of the replicas."""
        return [part for instance in self.hosts[host] for part in self.subtrees[instance]]

    def of_host(self, host: int) -> list[range]:
        """Return the largest subtrees that a host can make of them, which it sends."""
        parts = self.on_host(host)
        return subtrees(range(parts[0].start, parts[-1].stop), self.num_replicas)

    def sent_join(self, host: int, subtree: range) -> Join:
        """Return how a host joins a subtree that it sends, from those in its memory."""
        return join_order(self.on_host(host), subtree)

    def received(self, host: int) -> list[tuple[int, range]]:
        """Return (host, subtree) of all that an owner on `host` receives, in order of the replicas."""
        others = [other for other in range(len(self.hosts)) if other != host]
        return [(other, subtree) for other in others for subtree in self.of_host(other)]

    def total_join(self, host: int) -> Join:
        """Return how an owner on `host` joins everything: the subtrees in its memory, then those of `received`."""
        parts = [*self.on_host(host), *(subtree for _, subtree in self.received(host))]
        return join_order(parts, range(self.num_replicas))

    def helper(self, host: int, owner: int) -> int:
        """Return the instance of `host` that sends to an owner on another host, and receives from it."""
        return self.hosts[host][owner % len(self.hosts[host])]

    def holder(self, host: int, owner: int) -> int:
        """Return the instance of `host` that has the total of an owner's slice first."""
        return owner if owner in self.hosts[host] else self.helper(host, owner)

    def slices(self, length: int) -> list[slice]:
        """Return the slice of a buffer that each instance owns."""
        edges, before = [0], 0.0
        for share, instances in zip(self._shares, self.hosts, strict=True):
            for place in range(1, len(instances) + 1):
                edge = round(length * (before + share * place / len(instances)) / _ALIGNMENT) * _ALIGNMENT
                edges.append(min(length, edge))
            before += share
        edges[-1] = length
        return [slice(start, stop) for start, stop in pairwise(edges)]

    @cached_property
    def busiest(self) -> float:
        """How many buffers the busiest host sends or receives for one sum."""
        return max(
            max(load(own, share, sum(self._num_sent), len(self.hosts)))
            for own, share in zip(self._num_sent, self._shares, strict=True)
        )

    @cached_property
    def _num_sent(self) -> list[int]:
        return [len(self.of_host(host)) for host in range(len(self.hosts))]

    @cached_property
    def _shares(self) -> list[float]:
        return owned_shares(self._num_sent)


def load(own: int, share: float, num_all: int, num_hosts: int) -> tuple[float, float]:
    """Return how many buffers a host sends and receives that makes `own` of all `num_all` subtrees and owns a share."""
    sent = own * (1 - share) + (num_hosts - 1) * share
    return sent, (num_all - own) * share + 1 - share


def owned_shares(num_sent: Sequence[int]) -> list[float]:
    """Return which share of a buffer each host owns, such that the busiest host sends and receives the least.

    Host h, which owns the share w, sends its `num_sent[h]` subtrees of what others own, and the total of its own share
    to all others; it receives their subtrees of its own share, and the totals of the rest. Among shares that are
    equally good for the busiest, hosts with many subtrees own more, which makes for fewer messages in all.
    """
    num_hosts, num_all = len(num_sent), sum(num_sent)
    if num_hosts == 1:
        return [1.0]

    def limits(most: float) -> list[tuple[float, float]] | None:
        """Return the shares at which no host sends or receives more than `most` buffers."""
        found = []
        for own in num_sent:
            low, high = 0.0, 1.0
            # sent: own + (num_hosts - 1 - own) w; received: 1 + (num_all - own - 1) w
            for fixed, slope in ((own, num_hosts - 1 - own), (1, num_all - own - 1)):
                if slope > 0:
                    high = min(high, (most - fixed) / slope)
                elif slope < 0:
                    low = max(low, (fixed - most) / -slope)
                elif fixed > most:
                    return None
            if low > high:
                return None
            found.append((low, high))
        return found if sum(low for low, _ in found) <= 1 <= sum(high for _, high in found) else None

    enough, too_little = float(num_all + num_hosts), 0.0
    for _ in range(40):
        tried = (enough + too_little) / 2
        enough, too_little = (tried, too_little) if limits(tried) else (enough, tried)
    found = limits(enough)
    assert found is not None
    shares, left = [low for low, _ in found], 1 - sum(low for low, _ in found)
    for num in sorted(set(num_sent), reverse=True):
        alike = [host for host in range(num_hosts) if num_sent[host] == num]
        low, high = found[alike[0]]
        more = min(max(left, 0.0) / len(alike), high - low)  # `left` is rounded
        for host in alike:
            shares[host] += more
        left -= more * len(alike)
    return shares
