"""Who carries what, and where a process stands: pure functions of counts and of the launcher's environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import UserError
from podium.machine.cores import read_numa_nodes
from podium.topology import (
    auto_instances,
    build_topology,
    by_numa_node,
    possible_instances,
    resolve_threads,
    share_of_cores,
)


@given(
    num_replicas=st.integers(1, 96),
    num_stages=st.integers(1, 9),
    num_hosts=st.integers(1, 8),
)
def test_every_possible_count_carries_each_stage_of_each_replica_once(num_replicas, num_stages, num_hosts):
    hosts = tuple(f"host{index}" for index in range(num_hosts))
    for num_instances in possible_instances(num_replicas, num_stages, num_hosts):
        topology = build_topology(num_replicas, num_instances, hosts, num_stages)
        instances = range(num_instances)
        blocks = [topology.local_replicas(instance) for instance in instances]
        carried = [(replica, topology.stage_of(instance)) for instance in instances for replica in blocks[instance]]
        assert sorted(carried) == [(replica, stage) for replica in range(num_replicas) for stage in range(num_stages)]
        # all alike, in order, and whole subtrees of the reduction
        assert len({len(block) for block in blocks}) == 1
        assert all(block.start % len(block) == 0 for block in blocks)
        assert blocks == sorted(blocks, key=lambda block: block.start)
        held = [topology.host_of(instance) for instance in instances]
        assert [held.count(host) for host in hosts] == [num_instances // num_hosts] * num_hosts


@given(num_replicas=st.integers(1, 96), num_stages=st.integers(1, 9), num_hosts=st.integers(1, 8))
def test_a_pipeline_stays_on_one_host_where_it_can(num_replicas, num_stages, num_hosts):
    hosts = tuple(f"host{index}" for index in range(num_hosts))
    for num_instances in possible_instances(num_replicas, num_stages, num_hosts):
        topology = build_topology(num_replicas, num_instances, hosts, num_stages)
        for first in range(0, num_instances, num_stages):
            pipeline = range(first, first + num_stages)
            assert [topology.stage_of(instance) for instance in pipeline] == list(range(num_stages))
            assert len({topology.local_replicas(instance) for instance in pipeline}) == 1
            if topology.instances_per_host % num_stages == 0:
                assert len({topology.host_of(instance) for instance in pipeline}) == 1


@given(
    num_replicas=st.integers(1, 64),
    num_instances=st.integers(1, 64),
    num_hosts=st.integers(1, 6),
    num_stages=st.integers(1, 6),
)
def test_any_other_count_is_refused_with_those_that_would_do(num_replicas, num_instances, num_hosts, num_stages):
    hosts = tuple(f"host{index}" for index in range(num_hosts))
    works = possible_instances(num_replicas, num_stages, num_hosts)
    if num_instances in works:
        assert build_topology(num_replicas, num_instances, hosts, num_stages).num_instances == num_instances
        return
    with pytest.raises(UserError) as caught:
        build_topology(num_replicas, num_instances, hosts, num_stages)
    assert (f"(possible: {', '.join(map(str, works))})" if works else "no number of instances") in str(caught.value)


@pytest.mark.parametrize(
    ("num_replicas", "num_instances", "hosts", "num_stages", "parts"),
    [
        (8, 3, ("a",), 1, ["power of two", "possible: 1, 2, 4, 8"]),
        (12, 8, ("a",), 1, ["power of two", "possible: 1, 2, 4"]),
        (4, 8, ("a",), 1, ["at least one whole replica", "possible: 1, 2, 4"]),
        (
            8,
            1,
            ("a", "b"),
            1,
            ["1 instance on 2 hosts", "each of 2 hosts must carry the same number", "possible: 2, 4, 8"],
        ),
        (1, 2, ("a", "b"), 1, ["cannot carry 1 replica exactly", "no number of instances is possible"]),
        (8, 2, ("a", "a"), 1, ["named twice"]),
        (12, 8, ("a",), 3, ["12 replicas of 3 stages", "3 stages × a power of two", "possible: 3, 6, 12"]),
        (2, 16, ("a",), 4, ["one stage of at least one replica", "possible: 4, 8"]),
        (4, 3, ("a", "b"), 3, ["each of 2 hosts must carry the same number", "possible: 6, 12"]),
    ],
)
def test_counts_that_cannot_be_exact_say_which_would(num_replicas, num_instances, hosts, num_stages, parts):
    with pytest.raises(UserError) as caught:
        build_topology(num_replicas, num_instances, hosts, num_stages)
    for part in parts:
        assert part in str(caught.value)


def test_table_names_every_host_instance_and_replica():
    table = build_topology(16, 8, ("a", "b")).table()
    assert table.columns == ["host", "instance", "replicas"]
    assert table.rows[0] == ["a", "instance 0", "replicas 0 to 1"]
    assert table.rows[4] == ["b", "instance 4", "replicas 8 to 9"]
    assert table.caption == "2 hosts · 8 instances · 16 replicas"


def test_table_names_the_stage_of_every_instance_and_its_layers():
    topology = build_topology(16, 8, ("a", "b"), 4, (0, 4, 4, 4))
    table = topology.table()
    assert table.columns == ["host", "instance", "replicas", "stage", "layers"]
    assert table.rows[0] == ["a", "instance 0", "replicas 0 to 7", "stage 0", "0"]
    assert table.rows[3] == ["", "instance 3", "replicas 0 to 7", "stage 3", "4"]
    assert table.rows[4] == ["b", "instance 4", "replicas 8 to 15", "stage 0", "0"]
    assert table.caption == "2 hosts · 8 instances · 16 replicas · 4 stages"
    assert topology.record() == {"hosts": 2, "instances": 8, "replicas": 16, "stages": 4}


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_large_table_is_shortened_in_the_middle(num_stages):
    rows = build_topology(256, 256, ("a", "b"), num_stages).table().rows
    assert len(rows) < 40
    assert len({len(row) for row in rows}) == 1
    assert rows[-1][1] == "instance 255"
    assert rows[rows.index(["…"] * len(rows[0])) + 1][0] == "b"  # what follows the gap says where it is


@given(
    threads=st.integers(1, 8),
    cores=st.integers(1, 64),
    replicas=st.sampled_from([1, 2, 4, 8, 16]),
    stages=st.integers(1, 6),
    hosts=st.sampled_from([1, 2, 4]),
)
def test_auto_never_oversubscribes_unless_fewer_cannot_be(threads, cores, replicas, stages, hosts):
    works = possible_instances(replicas, stages, hosts)
    count = auto_instances(replicas, cores, threads, stages, hosts)
    assert count in works or not works
    assert count * threads <= cores or count == min(works, default=stages)


def test_threads_depend_on_cores_and_replicas_only():
    assert resolve_threads("auto", 8, 2) == 4
    assert resolve_threads("auto", 2, 8) == 1
    assert resolve_threads(3, 2, 8) == 3


@given(num_cores=st.integers(1, 32), local_count=st.integers(1, 32))
def test_instances_of_a_host_share_its_cores_without_overlap(num_cores, local_count):
    cores = tuple(range(100, 100 + num_cores))
    shares = [share_of_cores(cores, index, local_count) for index in range(local_count)]
    assert all(shares)
    if num_cores >= local_count:
        taken = [core for share in shares for core in share]
        assert len(taken) == len(set(taken))
        assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(
    ("cores", "lists", "ordered"),
    [
        ({0, 1, 2, 3}, ["0-3\n"], (0, 1, 2, 3)),
        ({0, 1, 2, 3}, ["0,2\n", "1,3\n"], (0, 2, 1, 3)),
        ({1, 3, 4, 9}, ["0-1,8-9\n", "2-7\n"], (1, 9, 3, 4)),
        ({5, 2}, [], (2, 5)),
    ],
)
def test_cores_of_one_numa_node_stand_together(cores, lists, ordered):
    assert by_numa_node(cores, read_numa_nodes(lists)) == ordered
