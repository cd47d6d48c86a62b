"""Durations mean what a person reads, exactly, and survive being written to a recipe."""

import re
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from podium.errors import UserError
from podium.recipe.durations import EXPECTED, Duration
from podium.recipe.section import Section


class Example(Section):
    warmup: Duration = Duration(0, "up")


def updates(text: str, total: int | None = 1000) -> int:
    return Duration.parse(text).updates(updates_per_epoch=60, global_batch=192, total_updates=total)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10ep", 600),
        ("0.1ep", 6),  # in binary floating point 0.1 * 60 is 6.000000000000001 rounded up
        ("0.01ep", 1),
        ("500up", 500),
        ("1e6sa", 5209),
        ("192sa", 1),
        ("193sa", 2),
        ("0.28of", 280),
        ("0.0001of", 1),
        ("1of", 1000),
        ("0", 0),
        ("0ep", 0),
        (" .5ep ", 30),
        ("2E2up", 200),
    ],
)
def test_duration_in_updates_rounds_up_from_the_written_number(text, expected):
    assert updates(text) == expected


@pytest.mark.parametrize("text", ["0.29of", "0.57of", "0.58of", "0.07ep", "1.1ep"])
def test_no_amount_suffers_from_binary_fractions(text):
    per_unit = 60 if text.endswith("ep") else 1000
    assert updates(text) == ceil(Fraction(text[:-2]) * per_unit)


@pytest.mark.parametrize("text", ["", "10", "ep", "10 epochs", "-1ep", "nanep", "infup", "1e999up", "10ep5", "0x1up"])
def test_what_is_no_duration_is_the_users_mistake(text):
    with pytest.raises(UserError, match="10ep"):
        Duration.parse(text)
    with pytest.raises(ValidationError, match=re.escape(EXPECTED)):
        Example(warmup=text)


@pytest.mark.parametrize("value", [5, 1.5, True, False, None, ["10ep"], -0.5])
def test_only_text_or_zero_is_read_from_a_recipe(value):
    with pytest.raises(ValidationError, match="expected a duration such as"):
        Example(warmup=value)


def test_parts_of_an_update_or_sample_and_more_than_the_training_are_refused():
    for text in ("1.5up", "0.5sa", "1.1of"):
        with pytest.raises(UserError):
            Duration.parse(text)
    with pytest.raises(ValidationError, match="more than the whole training"):
        Example(warmup="1.1of")


def test_a_fraction_needs_a_known_length():
    with pytest.raises(UserError, match="not known here"):
        updates("0.5of", total=None)
    assert updates("2ep", total=None) == 120


@pytest.mark.parametrize("zero", [0, 0.0, "0"])
def test_zero_means_none(zero):
    warmup = Example(warmup=zero).warmup
    assert not warmup
    assert Example(warmup="1up").warmup
    assert str(warmup) == "0up"


def test_a_section_writes_the_canonical_text():
    assert Example(warmup="10ep").model_dump() == {"warmup": "10ep"}
    assert Example(warmup="1e6sa").model_dump() == {"warmup": "1000000sa"}
    assert Example(warmup="0.280of").model_dump_json() == '{"warmup":"0.28of"}'
    assert Example.model_json_schema()["properties"]["warmup"]["type"] == "string"


durations = st.one_of(
    st.builds(Duration, st.floats(0, 1e12), st.just("ep")),
    st.builds(Duration, st.integers(0, 10**14).map(float), st.sampled_from(["up", "sa"])),
    st.builds(Duration, st.floats(0, 1), st.just("of")),
)


@given(durations)
def test_written_and_reread_a_duration_is_the_same(duration):
    assert Duration.parse(str(duration)) == duration
    assert Example(**Example(warmup=duration).model_dump()).warmup == duration


@given(durations, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**9))
def test_the_updates_just_contain_the_duration(duration, updates_per_epoch, global_batch, total):
    result = duration.updates(updates_per_epoch=updates_per_epoch, global_batch=global_batch, total_updates=total)
    exact = (
        Fraction(str(duration)[:-2])
        * {
            "ep": Fraction(updates_per_epoch),
            "up": Fraction(1),
            "sa": Fraction(1, global_batch),
            "of": Fraction(total),
        }[duration.unit]
    )
    assert exact <= result < exact + 1
