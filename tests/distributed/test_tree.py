"""The tree over replicas: its shape depends on the number of replicas alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.distributed.reduction.tree import TreeSum, replica_mean
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


@given(num_replicas=st.integers(1, 40), seed=st.integers(0, 99))
def test_last_leaf_may_be_added_to_the_partial_sums_from_the_right(num_replicas, seed):
    """What lets an instance sum its last replica piece by piece."""
    values = leaves(num_replicas, 5, seed)
    tree = TreeSum(num_replicas)
    for value in values[:-1]:
        tree.push([value.clone()])
    total = values[-1].clone()
    for (partial,) in reversed(tree.partial):
        total += partial
    assert torch.equal(total, tree_of(values))


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
