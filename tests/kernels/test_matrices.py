"""Products of matrices: those of torch in float64, for any sizes and strides, with the same bits on any threads."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.kernels.jit.matrices import PANEL, ROWS, multiply

#: around a tile, a panel, a block of the inner size and a slab
SIZES = st.one_of(
    st.integers(1, 3 * PANEL), st.sampled_from([ROWS, PANEL, 4 * PANEL, 4 * PANEL + 1, 255, 256, 257, 390, 530])
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix(rows: int, columns: int, turned: bool) -> torch.Tensor:
    """A part of a larger matrix: what is around it must not matter."""
    drawn = torch.randn(rows + 2, columns + 5)
    drawn = drawn.t().contiguous().t() if turned else drawn
    drawn[:1] = drawn[rows + 1 :] = drawn[:, :3] = drawn[:, columns + 3 :] = torch.nan
    return drawn[1 : rows + 1, 3 : columns + 3]


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.sampled_from(["none", "row", "target"]))
def test_a_product_is_that_of_torch_and_nothing_else_is_written(m, k, n, left_turned, right_turned, start):
    torch.manual_seed(m + k + n)
    left, right = matrix(m, k, left_turned), matrix(k, n, right_turned)
    around = torch.full((m + 2, n + 40), 7.0)
    target = around[1:-1, 20 : n + 20]
    expected = left.double() @ right.double()
    begin = None
    if start == "row":
        begin = torch.randn(n)
        expected += begin.double()
    elif start == "target":
        begin = target
        expected += 7
    multiply(left, right, target, begin)
    size = float(left.double().abs().max() * right.double().abs().max()) * k
    assert float((target.double() - expected).abs().max()) <= 1e-6 * max(1.0, size / k**0.5) * k**0.5
    target.fill_(7)
    assert bool((around == 7).all())


@pytest.mark.parametrize("turned", list(itertools.product([False, True], repeat=2)), ids=str)
def test_the_number_of_threads_changes_no_bit(turned, threads):
    torch.manual_seed(1)
    left, right = matrix(410, 700, turned[0]), matrix(700, 333, turned[1])
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        target = torch.empty(410, 333)
        multiply(left, right, target)
        found.append(target)
    assert all(torch.equal(found[0], other) for other in found)


def test_what_is_not_a_number_stays_in_its_row_and_column():
    left, right = torch.ones(30, 300), torch.ones(300, 70)
    left[17, 5], right[299, 69] = torch.nan, torch.inf
    target = torch.empty(30, 70)
    multiply(left, right, target)
    expected = left @ right
    assert torch.equal(target.isnan(), expected.isnan())
    assert torch.equal(target.isinf(), expected.isinf())
