"""Who carries what, and where a process stands: pure functions of counts and of the launcher's environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import UserError
from podium.machine.cores import read_numa_nodes
from podium.replica_tree import span_fits
from podium.topology import (
    Blocks,
    auto_instances,
    build_topology,
    by_numa_node,
    parse_hosts,
    possible_instances,
    resolve_threads,
    share_of_cores,
)
from tests.support.processes import assert_user_error, podium_here


@given(
    num_replicas=st.integers(1, 24),
    num_stages=st.integers(1, 5),
    num_hosts=st.integers(1, 6),
)
def test_every_possible_count_carries_each_stage_of_each_replica_once(num_replicas, num_stages, num_hosts):
    hosts = tuple(f"host{index}" for index in range(num_hosts))
    for num_instances in possible_instances(num_replicas, num_stages, num_hosts):
        topology = build_topology(num_replicas, num_instances, hosts, num_stages)
        instances = range(num_instances)
        blocks = [topology.local_replicas(instance) for instance in instances]
        carried = [(replica, topology.stage_of(instance)) for instance in instances for replica in blocks[instance]]
        assert sorted(carried) == [(replica, stage) for replica in range(num_replicas) for stage in range(num_stages)]
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        assert blocks == sorted(blocks, key=lambda block: block.start)
        held = [topology.host_of(instance) for instance in instances]
        assert held == [host for host, size in zip(hosts, topology.host_sizes, strict=True) for _ in range(size)]
        assert max(topology.host_sizes) - min(topology.host_sizes) <= num_stages
        assert min(topology.host_sizes) >= 1


@given(num_replicas=st.integers(1, 24), num_stages=st.integers(1, 5), num_hosts=st.integers(1, 6))
def test_a_pipeline_stays_on_one_host_where_it_can(num_replicas, num_stages, num_hosts):
    hosts = tuple(f"host{index}" for index in range(num_hosts))
    for num_instances in possible_instances(num_replicas, num_stages, num_hosts):
        topology = build_topology(num_replicas, num_instances, hosts, num_stages)
        for first in range(0, num_instances, num_stages):
            pipeline = range(first, first + num_stages)
            assert [topology.stage_of(instance) for instance in pipeline] == list(range(num_stages))
            assert len({topology.local_replicas(instance) for instance in pipeline}) == 1
            if all(size % num_stages == 0 for size in topology.host_sizes):
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
    assert (f"possible: {works[0]}" if works else "no number of instances") in str(caught.value)
    assert not works or f"{works[-1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("num_replicas", "num_instances", "hosts", "num_stages", "parts"),
    [
        (4, 8, ("a",), 1, ["at least one whole replica", "possible: 1 to 4"]),
        (8, 1, ("a", "b"), 1, ["1 instance on 2 hosts", "each of 2 hosts must carry at least one", "possible: 2 to 8"]),
        (1, 2, ("a", "b"), 1, ["cannot carry 1 replica", "no number of instances is possible"]),
        (8, 2, ("a", "a"), 1, ["named twice"]),
        (
            12,
            8,
            ("a",),
            3,
            ["12 replicas of 3 stages", "8 is not a multiple of 3 stages", "3 to 36, in multiples of 3"],
        ),
        (2, 16, ("a",), 4, ["one stage of at least one replica", "possible: 4, 8"]),
        (4, 3, ("a", "b", "c", "d"), 3, ["each of 4 hosts must carry at least one", "possible: 6, 9, 12"]),
    ],
)
def test_counts_that_cannot_be_say_which_could(num_replicas, num_instances, hosts, num_stages, parts):
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


def test_hosts_may_have_numbers_of_their_own():
    names, sizes = parse_hosts("a:3, b:5", None)
    topology = build_topology(16, 8, names, host_sizes=sizes)
    assert [row[0] for row in topology.table().rows] == ["a", "", "", "b", "", "", "", ""]
    assert list(topology.instances_on(1)) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("text", "count", "names", "sizes"),
    [
        ("a,b", 5, ("a", "b"), ()),
        ("a,b:3", None, ("a", "b"), (1, 3)),
        ("a,b:3,c", 8, ("a", "b", "c"), (3, 3, 2)),
        ("10.0.0.1:2,fe80::1,[fe80::2]:4", None, ("10.0.0.1", "fe80::1", "fe80::2"), (2, 1, 4)),
    ],
)
def test_hosts_are_names_with_or_without_numbers(text, count, names, sizes):
    assert parse_hosts(text, count) == (names, sizes)


@pytest.mark.parametrize(
    ("text", "count", "part"),
    [
        ("a,,b", None, "expected host names separated by commas"),
        ("a:0,b", None, "expected host names"),
        ("a:x,b", None, "expected host names"),
        ("a:3,b:5", 9, "--instances 9 does not fit --hosts a:3,b:5, which names 8 instances"),
        ("a:3,b", 3, "--instances 3 does not fit"),
    ],
)
def test_hosts_that_cannot_be_understood_are_one_sentence(text, count, part):
    with pytest.raises(UserError) as caught:
        parse_hosts(text, count)
    assert part in str(caught.value)


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
    replicas=st.integers(1, 16),
    stages=st.integers(1, 6),
    hosts=st.integers(1, 4),
)
def test_auto_never_oversubscribes_unless_fewer_cannot_be(threads, cores, replicas, stages, hosts):
    works = possible_instances(replicas, stages, hosts)
    count = auto_instances(replicas, cores, threads, stages, hosts)
    assert count in works or not works
    assert count * threads <= cores or count == min(works, default=stages)
    assert count == max((most for most in works if most * threads <= cores), default=count)


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


@given(
    num_replicas=st.integers(1, 24),
    span=st.sampled_from([1, 2, 4, 8]),
    alike=st.booleans(),
    num_hosts=st.integers(1, 3),
)
def test_what_a_recipe_asks_of_its_blocks_decides_which_counts_are_possible(num_replicas, span, alike, num_hosts):
    blocks = Blocks(span, alike)
    works = possible_instances(num_replicas, 1, num_hosts, blocks)
    hosts = tuple(map(str, range(num_hosts)))
    for count in range(num_hosts, num_replicas + 1):
        even = num_replicas % count == 0
        assert (count in works) == (
            (even or not alike) and (num_replicas % span > 0 or span_fits(span, num_replicas, count))
        )
        if count in works:
            assert build_topology(num_replicas, count, hosts, blocks=blocks).num_instances == count
        else:
            with pytest.raises(UserError, match="possible: 1"):
                build_topology(num_replicas, count, hosts, blocks=blocks)
    assert auto_instances(num_replicas, 10**6, 1, 1, num_hosts, blocks) == max(works, default=1)


def test_possible_counts_are_shown_as_ranges():
    for blocks, count, shown in (
        (Blocks(span=4), 3, "(possible: 1, 2, 4 to 8)"),
        (Blocks(alike=True), 3, "(possible: 1, 2, 4, 8)"),
    ):
        with pytest.raises(UserError) as caught:
            build_topology(8, count, blocks=blocks)
        assert str(caught.value).endswith(shown)
    with pytest.raises(UserError, match="…") as caught:
        build_topology(5040, 11, blocks=Blocks(alike=True))
    assert str(caught.value).endswith("1680, 2520, 5040)")
    assert len(str(caught.value)) < 400


def test_topology_and_auto_take_no_count_that_training_would_refuse(monkeypatch):
    spans = ["cnn/cifar_resnet8", "batch.replicas=8", "workload.model.norm.span=4", "engine.threads=1"]
    refused = podium_here("topology", *spans, "--instances", 3)
    assert_user_error(refused, "norm.span = 4 cannot lie in 3 instances of 8 replicas")
    monkeypatch.setattr("podium.commands.placing.usable_cores", lambda: (0, 1, 2))
    assert "1 host · 2 instances · 8 replicas" in podium_here("topology", *spans, "--instances", "auto").stdout
    other = ["mnist", "batch.replicas=8", "engine.threads=1"]
    assert "3 instances" in podium_here("topology", *other, "--instances", "auto").stdout
    alike = [*other, "parallel.shard=parameters", "engine.reduction=fast", "--instances"]
    assert "2 instances" in podium_here("topology", *alike, "auto").stdout
    assert_user_error(podium_here("topology", *alike, 3), "(possible: 1, 2, 4, 8)")
