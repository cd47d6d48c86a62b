"""Batch sizes: what is missing is derived, what contradicts is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from podium.recipe.sections.batch import BatchSection

sizes = st.integers(1, 64)


def sizes_of(**given_keys):
    section = BatchSection(**given_keys)
    return section.micro_batch, section.num_accumulation, section.num_replicas, section.global_batch


@given(
    micro=sizes,
    accumulation=sizes,
    replicas=sizes,
    drop=st.sampled_from(["micro", "accumulation", "replicas", "global"]),
)
def test_any_three_sizes_give_the_fourth(micro, accumulation, replicas, drop):
    whole = {
        "micro": micro,
        "accumulation": accumulation,
        "replicas": replicas,
        "global": micro * accumulation * replicas,
    }
    expected = tuple(whole.values())
    whole.pop(drop)
    assert sizes_of(**whole) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"micro": 8}, (8, 1, 1, 8)),
        ({"global": 64}, (64, 1, 1, 64)),
        ({"micro": 8, "global": 64}, (8, 8, 1, 64)),
        ({"micro": 8, "replicas": 4, "global": 64}, (8, 2, 4, 64)),
        ({"micro": 192, "replicas": 4, "scaling": "weak"}, (192, 1, 4, 768)),
        ({"micro": 192, "replicas": 4, "scaling": "strong"}, (48, 1, 4, 192)),
        ({"global": 192, "replicas": 4}, (48, 1, 4, 192)),
    ],
)
def test_sizes_are_derived(keys, expected):
    assert sizes_of(**keys) == expected


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_resolved_section_reads_back_equal(scaling):
    section = BatchSection(micro=192, replicas=4, accumulation=2, scaling=scaling)
    assert BatchSection(**section.model_dump(by_alias=True)) == section


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({}, "batch.micro is missing"),
        ({"micro": 8, "accumulation": 2, "replicas": 2, "global": 64}, "8 × 2 × 2 = 32"),
        ({"micro": 7, "global": 64}, "expected a multiple"),
        ({"micro": 10, "replicas": 4, "scaling": "strong"}, "expected a multiple of batch.replicas"),
    ],
)
def test_contradictions_are_errors_with_the_arithmetic(keys, part):
    with pytest.raises(ValidationError) as caught:
        BatchSection(**keys)
    assert part in str(caught.value)
