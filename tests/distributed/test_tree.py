"""The tree over replicas: its shape depends on the number of replicas alone."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from podium.distributed.reduction.exchange import Exchange, load, owned_shares
from podium.distributed.reduction.tree import TreeSum, replica_mean
from podium.distributed.reduction.uneven_buffers import sum_of
from podium.replica_tree import deal, subtrees
from tests.support.trees import tree_of


def leaves(num_replicas: int, size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10.0 ** (i % 7) for i in range(num_replicas)]


def summed(values: list[torch.Tensor]) -> torch.Tensor:
    tree = TreeSum(len(values))
    for value in values:
        tree.push([value.clone()])
    (total,) = tree.total()
    return total


@given(num_replicas=st.integers(1, 40), size=st.integers(0, 9), seed=st.integers(0, 99))
def test_sum_in_turn_equals_the_tree_bit_for_bit(num_replicas, size, seed):
    values = leaves(num_replicas, size, seed)
    assert torch.equal(summed(values), tree_of(values))


@given(log2_blocks=st.integers(0, 4), per_block=st.integers(1, 9), seed=st.integers(0, 99))
def test_aligned_blocks_are_subtrees(log2_blocks, per_block, seed):
    """For every power of two that divides the number of replicas, whatever is left over."""
    num_blocks = 2**log2_blocks
    values = leaves(num_blocks * per_block, 5, seed)
    blocks = [summed(values[i * per_block : (i + 1) * per_block]) for i in range(num_blocks)]
    assert torch.equal(summed(blocks), summed(values))


@given(data=st.data(), num_replicas=st.integers(1, 40), seed=st.integers(0, 99))
def test_last_leaf_of_any_block_may_be_added_to_the_partial_sums_from_the_right(data, num_replicas, seed):
    """What lets an instance sum its last replica piece by piece."""
    start = data.draw(st.integers(0, num_replicas - 1))
    block = range(start, data.draw(st.integers(start + 1, num_replicas)))
    values = leaves(num_replicas, 5, seed)
    tree = TreeSum(num_replicas, block)
    for replica in block[:-1]:
        tree.push([values[replica].clone()])
    complete, partials = tree.before_last()
    last = values[block[-1]].clone()
    for (partial,) in reversed(partials):
        last += partial
    sums = [*(values for (values,) in complete), last]
    for part, found in zip(subtrees(block, num_replicas), sums, strict=True):
        assert torch.equal(found, tree_of([values[replica] for replica in part]))


@st.composite
def exchanges(draw) -> Exchange:
    """Any replicas, on any number of instances of any hosts."""
    num_replicas = draw(st.integers(1, 24))
    left, sizes = draw(st.integers(1, num_replicas)), []
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return Exchange(num_replicas, tuple(draw(st.permutations(sizes))))


@given(exchange=exchanges(), seed=st.integers(0, 99), length=st.integers(1, 200))
def test_owners_of_slices_join_what_they_have_and_receive_to_the_sum_of_the_tree(exchange, seed, length):
    """Everything about an exchange but the messages: on any hosts, all of a buffer is the tree's sum bit for bit."""
    values = leaves(exchange.num_replicas, length, seed)
    slices = exchange.slices(length)
    assert [place for part in slices for place in range(length)[part]] == list(range(length))
    whole = tree_of(values)
    for owner, part in enumerate(slices):
        host = exchange.host_of(owner)
        made = {other: [summed(values[tree.start : tree.stop]) for tree in exchange.on_host(other)]
                for other in range(len(exchange.hosts))}  # fmt: skip
        sent = [sum_of(made[other], exchange.sent_join(other, tree)) for other, tree in exchange.received(host)]
        total = torch.empty(length)
        sum_of([*made[host], *sent], exchange.total_join(host), total)
        assert torch.equal(total[part], whole[part])
        for other, instances in enumerate(exchange.hosts):
            assert exchange.holder(other, owner) in instances


@given(num_replicas=st.integers(1, 64), data=st.data())
def test_blocks_are_as_even_as_can_be_and_cut_where_the_tree_is(num_replicas, data):
    num_blocks = data.draw(st.integers(1, num_replicas))
    blocks = deal(num_replicas, num_blocks)
    assert [replica for block in blocks for replica in block] == list(range(num_replicas))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    if num_blocks & (num_blocks - 1) == 0:  # what instances have in common by halves, quarters, ...
        assert all(len(subtrees(block, num_replicas)) == 1 for block in blocks)
        pairs = [range(a.start, b.stop) for a, b in zip(blocks[::2], blocks[1::2], strict=False)]
        assert all(len(subtrees(pair, num_replicas)) == 1 for pair in pairs)


@given(num_sent=st.lists(st.integers(1, 5), min_size=1, max_size=9))
@example(num_sent=[1, 1, 2, 2, 2, 2, 2, 4])
def test_no_other_shares_would_keep_the_busiest_host_less_busy(num_sent):
    shares, num_hosts = owned_shares(num_sent), len(num_sent)

    def busiest(shares: list[float]) -> float:
        return max(max(load(own, w, sum(num_sent), num_hosts)) for own, w in zip(num_sent, shares, strict=True))

    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    for giver in range(num_hosts):
        for taker in range(num_hosts):
            moved = min(0.01, shares[giver])
            other = [w + moved * ((host == taker) - (host == giver)) for host, w in enumerate(shares)]
            assert busiest(other) >= busiest(shares) - 1e-6
    assert busiest(shares) <= busiest([1 / num_hosts] * num_hosts) + 1e-6


@pytest.mark.parametrize("num_replicas", [1, 2, 7, 8, 64, 100])
def test_holds_at_most_log2_partial_sums(num_replicas):
    tree = TreeSum(num_replicas)
    for _ in range(num_replicas):
        tree.push([torch.ones(1)])
        assert len(tree.partial) <= num_replicas.bit_length()


def test_a_missing_gradient_counts_as_zero():
    tree = TreeSum(2)
    for value in ([None, torch.ones(2)], [torch.ones(1), None]):
        tree.push(value)
    first, second = tree.total()
    assert first.tolist() == [1.0]
    assert second.tolist() == [1.0, 1.0]


@given(num_replicas=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_buffer_that_no_replica_changes_keeps_its_bits(num_replicas, seed):
    start = torch.cat([*leaves(7, 5, seed), torch.tensor([0.0, torch.inf, -torch.inf])])
    total = summed([start] * num_replicas)
    assert torch.equal(replica_mean(total, start, num_replicas), start)


def test_buffers_are_averaged_over_replicas():
    start = torch.tensor([1.0, 2.0])
    total = summed([start, start + 1, start + 5])
    torch.testing.assert_close(replica_mean(total, start, 3), torch.tensor([3.0, 4.0]))
