"""Predicted times: exact laws are followed, intervals widen with the distance and narrow with the table."""

import numpy as np
import pytest

from podium.plan.scaling import predict
from podium.plan.tables import ScalingTable

COUNTS = (1, 2, 4, 8, 16, 32)


def table(seconds, counts=COUNTS) -> ScalingTable:
    return ScalingTable(counts, tuple(seconds(n) for n in counts))


def test_perfect_scaling_goes_on_as_it_is():
    (found,) = predict(table(lambda n: 64 / n), [256])
    assert found.value == pytest.approx(0.25, rel=0.05)
    assert 0.25 in found


@pytest.mark.parametrize(
    "seconds",
    [
        lambda n: (20 + 3 * np.log2(n)) / n,
        lambda n: 20 / n + 0.4,
        lambda n: (20 + 6 * (1 - 1 / n)) / n + 0.1,
    ],
)
def test_a_table_up_to_32_that_follows_a_law_gives_256_within_15_percent(seconds):
    (found,) = predict(table(seconds), [256])
    assert found.value == pytest.approx(seconds(256), rel=0.15)
    assert seconds(256) in found


def test_strong_scaling_has_its_own_laws():
    def seconds(n):
        return 40 / n + 0.2 * np.log2(n) + 0.1

    (found,) = predict(table(seconds), [256], "strong")
    assert found.value == pytest.approx(seconds(256), rel=0.15)


def test_intervals_widen_with_the_distance_and_with_a_shorter_table():
    def seconds(n):
        return (20 + 3 * np.log2(n)) / n + 0.1

    near, far = predict(table(seconds), [64, 256])
    (short,) = predict(table(seconds, COUNTS[:4]), [256])
    assert near.high / near.low < far.high / far.low < short.high / short.low
    assert short.high / short.low > 2


def test_the_same_table_gives_the_same_interval():
    assert predict(table(lambda n: 9 / n + 0.2), [64, 128]) == predict(table(lambda n: 9 / n + 0.2), [64, 128])
