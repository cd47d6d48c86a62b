"""Recipes: inheritance, overrides, derived values, and errors that say where, what, and what was expected."""

import typing
from pathlib import Path

import pytest

from podium.data.text.make import TextMake
from podium.errors import UserError
from podium.recipe.loading import load_recipe, recipe_from_tree, schema_of, to_yaml
from podium.recipe.overrides import parse_override
from podium.recipe.section import sections_of
from podium.recipe.shipped import shipped_recipes
from podium.workloads.registry import WORKLOADS


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


def test_a_circular_base_is_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "circular" in error_of(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=3", ["command line", "unknown key optim.lrr", "did you mean optim.lr?"]),
        ("optim.learning_rate=3", ["unknown key optim.learning_rate", "did you mean optim.lr?"]),
        ("optimizer.lr=3", ["unknown key optimizer.lr", "did you mean optim.lr?"]),
        ("batch.size=3", ["unknown key batch.size", "did you mean batch.micro?"]),
        ("batch.grad_accum=3", ["unknown key batch.grad_accum", "did you mean batch.accumulation?"]),
        ("train.epochs=3", ["unknown key train.epochs", "did you mean train.length?"]),
        ("train.steps=3", ["unknown key train.steps", "did you mean train.length?"]),
        ("val.every=3ep", ["unknown key val.every", "did you mean valid.every?"]),
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
        ("train.length=5", ["train.length = 5: expected a duration such as 10ep"]),
        ("train.length=2of", ['train.length = "2of": 2of is more than the whole training']),
        ("engine.threads=many", ['engine.threads = "many": expected a whole number or auto']),
        ("workload.model.filters=[8]", ["workload.model.filters = [8]: expected more values"]),
        ("workload.model.filters=[8,9,10]", ["workload.model.filters = [8, 9, 10]: expected at most 2 values"]),
        ("parallel.stages=x", ['parallel.stages = "x": expected the number of devices']),
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
    assert "expected expected" not in message
    assert not message.endswith(".")


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
    from podium.recipe.loading import recipe_path

    head = recipe_path(name).read_text().splitlines()
    comment = "\n".join(line for line in head[:12] if line.startswith("#"))
    assert f"podium train {name}" in comment


def chain(folder, *texts: str) -> str:
    """Files of which each has the one before as its base; the name of the last."""
    for number, text in enumerate(texts):
        base = f"base: {number - 1}.yaml\n" if number else ""
        (folder / f"{number}.yaml").write_text(base + text)
    return str(folder / f"{len(texts) - 1}.yaml")


MOMENTUM = "base: mnist\noptim: { name: nesterov, momentum: 0.8, weight_decay: 0.1 }\n"
STEPPED = "base: mnist\nschedule: { name: stepped, at: [1ep, 2ep], factor: [0.5, 0.1], warmup: 3up }\n"


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ([MOMENTUM], ["optim.name=adamw"]),
        ([MOMENTUM, "optim: { name: adamw }"], []),
        ([MOMENTUM, "optim: { momentum: 0.7 }", "optim: { name: adamw }", "seed: 3"], []),
        ([MOMENTUM, "optim: { name: lars, eps: 0 }", "optim: { name: adamw }"], []),
    ],
)
def test_another_optimiser_leaves_behind_what_a_base_set_for_the_one_before(tmp_path, files, overrides):
    optim = load_recipe(chain(tmp_path, *files), overrides).optim
    assert (optim.name, optim.momentum, optim.eps) == ("adamw", None, None)
    assert optim.weight_decay == 0.1  # it means something to both


@pytest.mark.parametrize(
    ("files", "overrides", "origin"),
    [
        ([MOMENTUM], ["optim.name=adamw", "optim.momentum=0.9"], "command line"),
        ([MOMENTUM, "optim: { name: adamw }"], ["optim.momentum=0.9"], "command line"),
        ([MOMENTUM, "optim: { name: adamw, momentum: 0.9 }"], ["seed=3"], "1.yaml"),
        ([MOMENTUM, "optim: { name: adamw }", "optim: { momentum: 0.9 }"], [], "2.yaml"),
    ],
)
def test_what_is_written_with_or_after_the_name_of_the_optimiser_is_an_error(tmp_path, files, overrides, origin):
    message = error_of(chain(tmp_path, *files), overrides)
    assert f"{origin}: optim.momentum does not apply to adamw" in message


def test_the_optimiser_of_the_base_named_once_more_keeps_its_keys(tmp_path):
    assert load_recipe(chain(tmp_path, MOMENTUM), ["optim.name=nesterov"]).optim.momentum == 0.8


def test_another_schedule_leaves_behind_what_a_base_set_for_the_one_before(tmp_path):
    file = chain(tmp_path, STEPPED)
    for name in ("cosine", "plateau", "constant"):  # a list of factors would be wrong for plateau too
        schedule = load_recipe(file, [f"schedule.name={name}"]).schedule
        assert (schedule.at, schedule.factor, str(schedule.warmup)) == (None, None, "3up")
    assert "command line: schedule.at does not apply" in error_of(file, ["schedule.name=cosine", "schedule.at=[1ep]"])


def test_the_rate_is_given_in_the_way_written_last(tmp_path):
    optim = load_recipe("cosmology", ["optim.lr_exponent=-9"]).optim
    assert (optim.lr, optim.lr_exponent, optim.scale) == (None, -9, "none")
    file = chain(tmp_path, "base: mnist\noptim: { lr_exponent: -9 }", "optim: { lr: 0.5 }")
    assert load_recipe(file).optim.lr_exponent is None
    assert "contradict each other" in error_of("mnist", ["optim.lr_exponent=-9", "optim.lr=1"])


@pytest.mark.parametrize(
    ("base", "written", "sizes"),
    [
        ("micro: 64", ["global=128"], (64, 2, 1, 128)),  # nothing contradicts
        ("micro: 64", ["global=100"], (100, 1, 1, 100)),
        ("micro: 32, accumulation: 2, replicas: 4", ["global=512"], (32, 4, 4, 512)),
        ("micro: 32, accumulation: 2, replicas: 4", ["global=192"], (24, 2, 4, 192)),
        ("micro: 32, accumulation: 2, replicas: 4", ["global=100"], (25, 1, 4, 100)),
        ("micro: 32, accumulation: 2, replicas: 4", ["global=7"], (7, 1, 1, 7)),
        ("global: 64, micro: 64", ["micro=16"], (16, 4, 1, 64)),
        ("global: 64, micro: 64", ["micro=48"], (48, 1, 1, 48)),
        ("global: 64, micro: 64", ["replicas=3"], (64, 1, 3, 192)),
        ("global: 64, micro: 64, accumulation: 1, replicas: 1", ["accumulation=3", "micro=10"], (10, 3, 1, 30)),
    ],
)
def test_batch_sizes_of_a_base_give_way_to_those_they_contradict(tmp_path, base, written, sizes):
    file = chain(tmp_path, f"base: mnist\nbatch: {{ {base} }}")
    batch = load_recipe(file, [f"batch.{size}" for size in written]).batch
    assert (batch.micro, batch.accumulation, batch.replicas, batch.global_) == sizes
    # the same through a file, whose sizes a later one may overrule again
    upper = ", ".join(size.replace("=", ": ") for size in written)
    (tmp_path / "upper.yaml").write_text(f"base: 0.yaml\nbatch: {{ {upper} }}\n")
    assert load_recipe(str(tmp_path / "upper.yaml")).batch == batch
    assert load_recipe(str(tmp_path / "upper.yaml"), ["batch.global=6", "batch.replicas=2"]).batch.global_ == 6


def test_batch_sizes_written_together_must_agree():
    message = error_of("mnist", ["batch.global=100", "batch.micro=3"])
    assert message == "command line: batch.global = 100: expected a multiple of micro × replicas = 3"


@pytest.mark.parametrize(
    ("recipe", "below", "written", "dropped"),
    [
        ("bert", {}, "model.size=large", "model.layers"),
        ("gpt2", {}, "model.size=small", "model.hidden"),
        ("neuron", {"data": {"source": "files", "path": "here"}}, "data.source=simulated", "data.path"),
        ("cosmology", {"data": {"source": "files", "path": "here"}}, "data.source=simulated", "data.path"),
        ("bert", {"data": {"path": "here"}}, "data.source=generated", "data.path"),
        ("cnn/quick", {"model": {"name": "efficientnet", "size": "B0", "drop_connect": 0.1}},
         "model={name: resnet, size: 20}", "model.drop_connect"),
    ],
)  # fmt: skip
def test_keys_of_a_workload_from_below_give_way_too(tmp_path, recipe, below, written, dropped):
    (tmp_path / "below.yaml").write_text(to_yaml({"base": recipe, "workload": below}))
    assert key_of(load_recipe(str(tmp_path / "below.yaml")), f"workload.{dropped}") is not None
    assert key_of(load_recipe(str(tmp_path / "below.yaml"), [f"workload.{written}"]), f"workload.{dropped}") is None


def key_of(recipe, dotted: str):
    value = recipe.tree()
    for part in dotted.split("."):
        value = value[part]
    return value


# --- text on the command line ---------------------------------------------------------------------------------------

#: what YAML would take for a mapping, a number, a list, a truth value or nothing, and white space it would drop
TEXTS = ["ROMEO:", "class ", " a: b", "12", "1e3", "[x", "{a: 1}", "true", "# no comment", "'quoted'", "a=b", "&x", "!"]


def keys_of_text(schema, prefix=""):
    """Every key of a schema that takes text or a path and no number."""
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        is_list = typing.get_origin(field.annotation) in (list, tuple, dict)
        kinds = set() if is_list else {field.annotation, *typing.get_args(field.annotation)}
        for section in sections_of(field):
            yield from keys_of_text(section, f"{key}.")
        if kinds & {str, Path} and not kinds & {int, float, bool}:
            yield key


@pytest.mark.parametrize("workload", WORKLOADS)
def test_overrides_of_text_are_what_was_given_to_the_character(workload):
    schema = schema_of(workload)
    keys = {*keys_of_text(schema), "workload.init_from"}
    assert {"engine.device", "launch.ssh", "log.wandb_project", "workload.data.path", "workload.init_from.path"} <= keys
    for key in keys:
        for text in TEXTS:
            assert parse_override(f"{key}={text}", schema) == (key, text)


def test_text_reaches_the_recipe_as_it_was_given():
    for text in (*TEXTS, "", "null"):
        assert load_recipe("gpt2/quick", [f"workload.data.sample.prompt={text}"]).workload.data.sample.prompt == text
    recipe = load_recipe("neuron", ["workload.data.source=files", "workload.data.path=2024", "workload.data.cell=12"])
    assert (recipe.workload.data.path, recipe.workload.data.cell) == (Path("2024"), "12")


def test_what_may_be_nothing_is_nothing_by_null():
    for text in ("", "null", "~"):
        assert load_recipe("neuron", [f"workload.data.path={text}"]).workload.data.path is None


def test_lists_of_text_hold_text():
    recipe = load_recipe("mnist", ["workload.data.class_names=[0, 1, on, 'a b']", "optim.no_decay=[1]"])
    assert recipe.workload.data.class_names == ("0", "1", "on", "a b")
    assert recipe.optim.no_decay == ["1"]
    assert parse_override("input=a: b.txt", TextMake) == ("input", "a: b.txt")
    assert parse_override("input=[1, b c.txt]", TextMake) == ("input", ["1", "b c.txt"])


def test_keys_that_take_a_number_or_text_are_read_as_yaml():
    assert load_recipe("cnn/quick", ["workload.model.size=20"]).workload.model.size == 20
