"""Recipes: inheritance, overrides, derived values, and errors that say where, what, and what was expected."""

import pytest

from podium.errors import UserError
from podium.recipe import load_recipe, recipe_from_tree, shipped_recipes, to_yaml


def error_of(*args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name, _ in shipped_recipes()])
def test_every_shipped_recipe_loads_and_its_resolved_form_reads_back_equal(name):
    recipe = load_recipe(name)
    again = recipe_from_tree(recipe.tree())
    assert again == recipe
    assert again.sha256() == recipe.sha256()


@pytest.mark.parametrize("name", [name for name, _ in shipped_recipes()])
def test_resolved_yaml_reads_back_equal(name, tmp_path):
    recipe = load_recipe(name)
    (tmp_path / "again.yaml").write_text(to_yaml(recipe.tree()))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_bare_workload_name_is_its_default_recipe():
    assert load_recipe("neuron") == load_recipe("neuron/quick")


def test_overrides_are_typed_by_the_schema():
    recipe = load_recipe("mnist", ["optim.lr=2e-3", "train.length=3ep", "batch.micro=16", "log.tensorboard=false"])
    assert (recipe.optim.lr, str(recipe.train.length), recipe.batch.micro) == (2e-3, "3ep", 16)
    assert recipe.log.tensorboard is False


def test_base_is_inherited_and_the_later_file_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: mnist\noptim: {lr: 0.5}\n")
    (tmp_path / "child.yaml").write_text("base: mine.yaml\nbatch: {micro: 4}\n")
    recipe = load_recipe(str(tmp_path / "child.yaml"))
    assert (recipe.optim.lr, recipe.batch.micro, recipe.optim.name) == (0.5, 4, "momentum")


def test_base_that_goes_round_in_a_circle_is_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "circle" in error_of(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=3", ["command line", "unknown key optim.lrr", "did you mean optim.lr?"]),
        ("optim.learning_rate=3", ["unknown key optim.learning_rate", "did you mean optim.lr?"]),
        ("micro=3", ["unknown key micro", "did you mean batch.micro?"]),
        ("optim.micro=3", ["unknown key optim.micro", "did you mean batch.micro?"]),
        ("workload.model.droput=0.1", ["unknown key workload.model.droput", "workload.model.dropout"]),
        ("batch.micro=abc", ["batch.micro", '"abc"', "expected a whole number"]),
        ("batch.micro=2.5", ["batch.micro", "2.5", "expected a whole number"]),
        ("batch.micro=true", ["batch.micro", "true", "expected a whole number"]),
        ("batch.micro=0", ["batch.micro", "0", "greater than 0"]),
        ("optim.lr=fast", ["optim.lr", '"fast"', "expected a number"]),
        ("optim.name=adm", ["optim.name", '"adm"', "expected one of", "did you mean adam?"]),
        ("log.tensorboard=1", ["log.tensorboard", "1", "expected true or false"]),
        ("train.length=5", ["train.length", "5", "10ep"]),
        ("train.time_limit=soon", ["train.time_limit", '"soon"', "30m"]),
        ("batch=3", ["batch", "3", "a section with keys of its own"]),
        ("seed=-1", ["seed", "-1"]),
        ("nonsense", ["not of the form section.key=value"]),
        ("workload.name=mnits", ["workload.name", '"mnits"', "did you mean mnist?"]),
    ],
)
def test_errors_name_origin_key_value_expectation_and_nearest_key(override, parts):
    message = error_of("mnist", [override])
    for part in parts:
        assert part in message, message
    assert "\n" not in message


def test_error_in_a_base_file_names_that_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: mnist\noptim: {lr: quick}\n")
    (tmp_path / "child.yaml").write_text("base: mine.yaml\n")
    assert str(tmp_path / "mine.yaml") in error_of(str(tmp_path / "child.yaml"))


def test_duplicate_keys_are_errors_with_the_line(tmp_path):
    (tmp_path / "twice.yaml").write_text("base: mnist\nseed: 1\nseed: 2\n")
    message = error_of(str(tmp_path / "twice.yaml"))
    assert "twice.yaml line 3" in message
    assert "duplicate" in message


@pytest.mark.parametrize("text", ["{", "- 1\n", "a: [1\n", "\t- x: y", "!!python/object:os.system {}\n"])
def test_broken_yaml_is_one_sentence(tmp_path, text):
    (tmp_path / "broken.yaml").write_text(text)
    message = error_of(str(tmp_path / "broken.yaml"))
    assert "broken.yaml" in message
    assert "\n" not in message


def test_unknown_recipe_suggests_the_nearest():
    assert "did you mean mnist?" in error_of("mnits")
    assert "does not exist" in error_of("no/such.yaml")


def test_recipe_outside_the_shipped_folder_is_not_found_by_name():
    assert "no recipe" in error_of("../../secret")


@pytest.mark.parametrize("name", [name for name, _ in shipped_recipes()])
def test_every_shipped_recipe_opens_with_its_command(name):
    from podium.recipe import recipe_path

    head = recipe_path(name).read_text().splitlines()
    comment = "\n".join(line for line in head[:12] if line.startswith("#"))
    assert f"podium train {name}" in comment
