"""`key=v1,v2` on the command line."""

import pytest

from podium.errors import UserError
from podium.recipe.loading import schema_of
from podium.study.notation import read_range, read_words, split_values


def read(*words, ranges=False):
    return read_words(words, schema_of("neuron"), ranges)


def test_one_value_is_for_all_runs_and_several_are_tried():
    fixed, varied = read("optim.lr=1e-3,2e-3", "batch.micro=8", "train.length=2ep,4ep")
    assert fixed == {"batch.micro": 8}
    assert varied == {"optim.lr": [1e-3, 2e-3], "train.length": ["2ep", "4ep"]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2", ["1", "2"]),
        ("[0.9,0.99],[0.9,0.999]", ["[0.9,0.99]", "[0.9,0.999]"]),
        ("{a: 1, b: 2},3", ["{a: 1, b: 2}", "3"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ('"a\\",b",c', ['"a\\",b"', "c"]),
    ],
)
def test_commas_inside_brackets_and_quotes_divide_nothing(text, parts):
    assert split_values(text) == parts


def test_ranges_are_read_where_something_is_drawn_from_them():
    assert read_range("1e-4..1e-2:log") == {"from": 1e-4, "to": 1e-2, "log": True}
    assert read_range("8..64:8") == {"from": 8, "to": 64, "step": 8}
    assert read_range("a..b") is None
    assert read("optim.lr=1e-4..1e-2:log", ranges=True)[1] == {"optim.lr": {"from": 1e-4, "to": 1e-2, "log": True}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr"], "section.key=value"),
        (["optim.lr=1,2", "optim.lr=3"], "given twice"),
        (["optim.lr=1,,2"], "empty value"),
    ],
)
def test_mistakes(words, said):
    with pytest.raises(UserError, match=said):
        read(*words)
