"""How often the host waits for a device: counted on a pretended one, by the function that waits."""

import pytest

from tests.support import pretend
from tests.support.recipes import TINY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())]

#: where the host may wait while updates are made, and why
ALLOWED = {
    "event in data/upload.py wait": "in the feed's thread, before memory is filled again that a device has read",
}
#: the same for optimisers that cannot leave a step out on the device
ALLOWED_OF_RMSPROP = {"item in optim/optimisers.py step": "gradients that have overflowed make no step"}
_SAME = ("valid.every=0up", "checkpoint.every=0up", "engine.updates_per_call=1000", "optim.clip_norm=0.5",
         "schedule.warmup=1up", *pretend.SAME_BITS)  # fmt: skip
_FEW, _MORE = 4, 12


def recipes(updates):
    found = {name: [*recipe, *_SAME, f"train.length={updates}up"] for name, recipe in TINY.items()}
    scaled = ["precision.mode=16.16", "precision.half=fp16", "precision.loss_scale=auto"]
    found["mnist/loss_scale=auto"] = [*found["mnist"], *scaled]
    return found | {"mnist/rmsprop": [*found["mnist"], *scaled, "optim.name=rmsprop", "optim.lr=1e-4"]}


def of_two(updates):
    """The same of two instances: whole replicas, stages, statistics shared between instances."""
    eight_replicas = ["batch.replicas=8", "batch.micro=2"]
    found = {name: [*recipes(updates)[name], *eight_replicas] for name in ("mnist", "neuron", "gpt2", "cnn")}
    found["cnn"] += ["workload.model.norm.span=8"]
    found["mnist/loss_scale=auto"] = [*recipes(updates)["mnist/loss_scale=auto"], *eight_replicas]
    return found | {"gpt2/stages": [*found["gpt2"], "parallel.stages=2", "optim.clip_norm=null"]}


def more_of(few, more):
    """Return by training and place how often the longer one has waited more."""
    return {
        name: {
            place: number - few[name]["waits"].get(place, 0)
            for place, number in answer["waits"].items()
            if number != few[name]["waits"].get(place, 0)
        }
        for name, answer in more.items()
    }


@pytest.fixture(scope="module")
def waits_of_two(tmp_path_factory):
    return more_of(*(pretend.trained(tmp_path_factory.mktemp("two"), of_two(num), 2) for num in (_FEW, _MORE)))


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    return more_of(*(pretend.trained(tmp_path_factory.mktemp("one"), recipes(num), 1, 1) for num in (_FEW, _MORE)))


@pytest.mark.parametrize("name", recipes(1))
def test_an_update_does_not_wait_for_the_device(name, waits):
    """Beginning and end of both trainings are alike, so what one has more of are the waits of its further updates."""
    allowed = ALLOWED | (ALLOWED_OF_RMSPROP if name.endswith("rmsprop") else {})
    assert set(waits[name]) <= set(allowed), waits[name]


@pytest.mark.parametrize("name", of_two(1))
def test_an_update_of_two_instances_does_not_wait_for_the_device(name, waits_of_two):
    assert set(waits_of_two[name]) <= set(ALLOWED), waits_of_two[name]


def test_waits_are_counted(waits):
    assert waits["mnist/rmsprop"]["item in optim/optimisers.py step"] == _MORE - _FEW
