"""Recipes made to harm: refused at once with one sentence, or read exactly as written."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import UserError
from podium.recipe.durations import Duration
from podium.recipe.loading import load_recipe, parse_override, read_yaml, recipe_from_tree, to_yaml
from podium.recipe.shipped import SHIPPED
from tests.support.hostile import JSON_VALUES, NO_FILES, Tally, attack, changed_tree, damaged, no_hang, replace_by
from tests.support.processes import assert_user_error, podium_afresh, podium_here


def _levels(top: str, below: str) -> str:
    """Nine levels, each of which names the one below ten times."""
    lines = [top]
    for here, under in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{here}: &{here} {below.format(', '.join([f'*{under}'] * 10))}")
    return "\n".join(lines)


HARMFUL = {
    "aliases that multiply": (_levels("a: &a [x, x]", "[{}]"), "with its aliases written out it has more than 100,000"),
    "merges that multiply": (_levels("a: &a {k: 1}", "{{<<: [{}]}}"), "more than 100,000 values"),
    "an alias that contains itself": ("a: &a [*a]", "an alias contains itself"),
    "a section that contains itself": ("base: mnist\noptim: &o {lr: 0.1, again: *o}", "an alias contains itself"),
    "5,000 lists in each other": (f"base: mnist\nseed: {'[' * 5000}{']' * 5000}", "nested more than 50 levels deep"),
    "5,000 sections in each other": (f"base: mnist\nseed: {'{a: ' * 5000}{'}' * 5000}", "nested more than 50 levels"),
    "400 levels of lines": ("\n".join(" " * i + "a:" for i in range(400)), "nested more than 50 levels deep"),
    "5,000 digits": (f"base: mnist\nseed: {'9' * 5000}", "a number or a date that cannot be read"),
    "4,000 digits": (f"base: mnist\nseed: {'9' * 4000}", "more digits than any key can take"),
    "half a megabyte": ("base: mnist\n" + "# \n" * 200_000, "more than the 131,072 bytes"),
    "keys that are lists": ("base: mnist\n? [1, 2]\n: 3", "a key is neither text nor a number"),
    "a date that does not exist": ("base: mnist\nseed: 2001-99-99", "a number or a date that cannot be read"),
    "half of a character": ('base: mnist\noptim: {name: "\\ud800"}', "half of a character"),
    "an object of Python": (
        "base: mnist\nseed: !!python/object/apply:os.system [exit]",
        "could not determine",
    ),
    "UTF-16": ("base: mnist".encode("utf-16"), "not text in UTF-8"),
    "a zero": ("base: mni\0st", "special characters are not allowed"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_recipes_are_refused_at_once(tmp_path, name):
    content, part = HARMFUL[name]
    path = tmp_path / "harmful.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.process_time()
    done = podium_here("show", path)
    assert time.process_time() - began < 20  # minutes or hours, where it is not refused
    assert_user_error(done, "harmful.yaml", part)


def test_bases_are_read_once_each_however_often_they_are_named(tmp_path):
    for level in range(24):
        below = "mnist" if level == 23 else f"b{level + 1}.yaml"
        (tmp_path / f"b{level}.yaml").write_text(f"base: [{below}, {below}]\nseed: {level}\n")
    assert load_recipe(str(tmp_path / "b0.yaml")).seed == 0


def test_a_base_that_comes_twice_counts_where_it_comes_last(tmp_path):
    (tmp_path / "x.yaml").write_text("base: mnist\nseed: 5\noptim: {lr: 0.125}\n")
    (tmp_path / "y.yaml").write_text("seed: 6\nlog: {report: false}\n")
    (tmp_path / "z.yaml").write_text("base: [x.yaml, y.yaml, x.yaml]\n")
    recipe = load_recipe(str(tmp_path / "z.yaml"))
    assert (recipe.seed, recipe.log.report, recipe.optim.lr) == (5, False, 0.125)


def test_a_chain_of_bases_has_a_limit(tmp_path):
    for number in range(100):
        (tmp_path / f"c{number}.yaml").write_text(f"base: c{number + 1}.yaml\n")
    with pytest.raises(UserError, match="put together from at most 64 files"):
        load_recipe(str(tmp_path / "c0.yaml"))


@pytest.mark.parametrize(
    "text", ["optim.lr=" + "[" * 3000, "optim.lr=" + "9" * 5000, "optim.lr=&a [*a]", "a." * 400 + "b=1", "seed=" * 900]
)
def test_harmful_values_on_the_command_line(text):
    assert_user_error(podium_here("show", "mnist", text))


def test_escape_and_direction_characters_are_shown_not_obeyed(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('base: "\\e]0;title\\a\\e[2J\\u202egnp.exe\\u2066"\n', encoding="utf-8")
    done = podium_afresh(tmp_path, "show", "a.yaml", "optim.\x1b[31m\u202elr=1")
    assert_user_error(done)
    assert not set(done.stderr) & {"\x1b", "\x07", "\u202e", "\u2066"}
    done = podium_here("show", "mnist", "optim.\x1b[31m\u202elr=1")
    assert_user_error(done, r"optim.\x1b[31m\u202elr")


@pytest.mark.parametrize("kind", sorted(NO_FILES))
def test_what_is_no_recipe_file_is_told_at_once(tmp_path, kind):
    replace_by(tmp_path / "a.yaml", kind)
    with no_hang():
        assert_user_error(podium_here("show", tmp_path / "a.yaml"), "a.yaml")


# ------------------------------------------------------------------------------------------------------ mutations


def _as_written(path) -> None:
    recipe = load_recipe(str(path))
    again = path.with_name("again.yaml")
    again.write_text(to_yaml(recipe.tree()))
    assert recipe_from_tree(read_yaml(again)) == recipe


@pytest.mark.slow
def test_damaged_recipes(tmp_path):
    originals = [path.read_bytes() for path in sorted(SHIPPED.glob("*/*.yaml"))]
    path, tally = tmp_path / "damaged.yaml", Tally("recipes, damaged text")

    @attack(300)
    @given(damaged(originals))
    def damage(data):
        path.write_bytes(data)
        tally.refused(lambda: _as_written(path), path)

    damage()
    tally.report()
    assert tally.right
    assert len(tally.kinds) > 10


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["mnist", "gpt2", "neuron"])
def test_recipes_with_other_values(tmp_path, workload):
    tree = load_recipe(workload).tree()
    path, tally = tmp_path / "changed.yaml", Tally(f"recipes, other values, {workload}")

    @attack(120)
    @given(changed_tree(tree))
    def change(changed):
        path.write_text(json.dumps(changed))  # JSON is YAML
        tally.refused(lambda: _as_written(path), path)

    change()
    tally.report()
    assert tally.right
    assert len(tally.kinds) > 5


@pytest.mark.slow
def test_values_on_the_command_line():
    keys = ["train.length", "train.time_limit", "optim.lr", "seed", "batch.micro", "precision", "launch.timeout", "x.y"]
    tally = Tally("overrides")

    @attack(250)
    @given(st.sampled_from(keys), st.text(max_size=20) | JSON_VALUES.map(json.dumps))
    def override(key, value):
        tally.refused(lambda: load_recipe("mnist", [f"{key}={value}"]).sha256(), value)

    override()
    tally.report()
    assert tally.right
    assert len(tally.kinds) > 5


@pytest.mark.slow
def test_times_and_durations():
    amounts = st.from_regex(r"[0-9.e+\-_ ]{0,8}", fullmatch=True) | st.floats().map(repr) | st.text(max_size=6)
    units = st.sampled_from(["ep", "up", "sa", "of", "s", "m", "h", "d", "", "EP", "x"])
    tally = Tally("times and durations")

    @attack(400)
    @given(amounts, units)
    def write(amount, unit):
        text = f"{amount}{unit}"

        def parse() -> None:
            duration = Duration.parse(text)
            assert Duration.parse(str(duration)) == duration
            assert duration.updates(updates_per_epoch=60, global_batch=8, total_updates=600) >= 0

        tally.refused(parse, text)
        tally.refused(lambda: load_recipe("mnist", [f"train.time_limit={text}"]).sha256(), text)

    write()
    tally.report()
    assert tally.right
    assert tally.kinds


def test_keys_without_a_name_are_shown_as_such(tmp_path):
    (tmp_path / "a.yaml").write_text('base: mnist\n"": {"": 1}\n')
    assert_user_error(podium_here("show", tmp_path / "a.yaml"), 'unknown key "."')


def test_values_of_the_command_line_keep_their_types():
    assert parse_override("a.b=[1, 2.5, x, true, null]") == ("a.b", [1, 2.5, "x", True, None])
    assert parse_override("a.b=&x 3") == ("a.b", 3)
    assert parse_override("a.b=2*3") == ("a.b", "2*3")
    assert parse_override("a.b=") == ("a.b", None)
