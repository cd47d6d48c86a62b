"""The tree over replicas: its shape depends on the number of replicas alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.engine.reduce import TreeSum


def tree_of(values: list[torch.Tensor]) -> torch.Tensor:
    """The same sum written as a recursion: the left part is the largest power of two below the whole."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return tree_of(values[:half]) + tree_of(values[half:])


@given(num_replicas=st.integers(1, 40), size=st.integers(0, 9), seed=st.integers(0, 99))
def test_sum_in_turn_equals_the_tree_bit_for_bit(num_replicas, size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=generator) * 10.0 ** (i % 7) for i in range(num_replicas)]
    tree = TreeSum()
    for value in values:
        tree.push([value.clone()])
    (total,) = tree.total()
    assert torch.equal(total, tree_of(values))


@pytest.mark.parametrize("num_replicas", [1, 2, 8, 64, 100])
def test_holds_at_most_log2_partial_sums(num_replicas):
    tree = TreeSum()
    for _ in range(num_replicas):
        tree.push([torch.ones(1)])
        assert len(tree._partial) <= num_replicas.bit_length()


def test_a_missing_gradient_counts_as_zero():
    tree = TreeSum()
    for value in ([None, torch.ones(2)], [torch.ones(1), None]):
        tree.push(value)
    first, second = tree.total()
    assert first.tolist() == [1.0]
    assert second.tolist() == [1.0, 1.0]
