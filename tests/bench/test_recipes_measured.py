"""The lines that `python -m bench.recipes` puts at the heads of recipes."""

import pytest
from bench.recipes import BY_LAYERS, WHOLE, Line, _path, rate_of, small_form, with_line

from podium.recipe.loading import load_recipe
from podium.recipe.shipped import shipped_recipes

NAMES = [name for name, _ in shipped_recipes()]
SAID = "3.1 samples/s; so one update of 64 samples would take 20 s. The whole training has not been measured."


def test_every_recipe_has_a_form_that_one_process_trains():
    for name in NAMES:
        recipe = load_recipe(name, [])
        overrides = WHOLE[name] if name in WHOLE else small_form(name, recipe)
        small = load_recipe(name, list(overrides))
        assert small.parallel.stages == 1, name
        assert small.batch.num_accumulation == 1 or name in WHOLE, name
    assert WHOLE.keys() | BY_LAYERS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_line_takes_the_place_of_the_one_before_and_leaves_the_recipe_as_it_was(name):
    text = _path(name).read_text(encoding="utf-8")
    new = with_line(text, Line(name, (), SAID))
    assert with_line(new, Line(name, (), SAID.replace("3.1", "2.9"))) == new.replace("3.1 samples", "2.9 samples")

    def body(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("#")]

    assert body(new) == body(text)
    assert max(map(len, Line(name, small_form(name, load_recipe(name, [])), SAID).comment().splitlines())) <= 120
    assert "Not measured." not in new or "Not measured." not in text


@pytest.mark.slow
def test_a_training_is_watched_for_a_few_updates_and_ended():
    overrides = ("workload.data.source=generated", "engine.threads=1", "workload.data.generated_train=4096")
    assert rate_of("mnist/exercise", overrides, 0.05) > 10
