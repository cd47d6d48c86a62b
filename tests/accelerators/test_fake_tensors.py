"""One update of every workload, number format and optimiser on a fake CUDA device: no operator gets tensors of two
devices, the host waits for nothing, and torch's meta kernels of CUDA accept every shape and type."""

import pytest

from podium.recipe.sections.optim import KEYS
from tests.support import fake_cuda
from tests.support.recipes import TINY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(fake_cuda.why_not()), reason=fake_cuda.why_not())]

_MODES = ("32.32", "16.32", "16.16")
_SHORT = ("schedule.warmup=1up", "optim.clip_norm=0.5")
RECIPES = {
    f"{name}/{mode}": [*recipe, *_SHORT, f"precision={mode}"] for name, recipe in TINY.items() for mode in _MODES
}
#: what a loss is made to do, and what is said about it
SPOILT = {
    "reads a number": "Waited: the host waits for aten._local_scalar_dense",
    "counts": "Waited: the host waits for aten.nonzero",
    "mixes": "Mixed: tensors of two devices meet in mul",
    "copies": "copy to the host",
    "sends": "copy from the host",
    "nothing": "",
}
#: numbers that are sent to a device once, in the first update of a process
_ONCE = {"copy from the host in workloads/cnn/augment.py _normalised"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    return fake_cuda.updates(folder, RECIPES, list(KEYS), {"mnist/32.32": list(SPOILT)})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("optimiser", KEYS)
def test_an_update_stays_on_its_device_and_waits_for_nothing(name, optimiser, answers):
    answer = answers[f"{name}/{optimiser}"]
    assert "error" not in answer, answer["error"]
    assert set(answer["waits"]) <= (_ONCE if optimiser == next(iter(KEYS)) else set()), answer["waits"]
    assert answer["operators"] > 100
    assert answer["channels_last"] == (name in ("cnn/16.32", "cnn/16.16", "mnist/16.32", "mnist/16.16"))


@pytest.mark.parametrize("what", SPOILT)
def test_waits_and_mixed_devices_are_found(what, answers):
    answer = answers[f"mnist/32.32/{what}"]
    found = answer.get("error", "") + " ".join(answer["waits"])
    assert found.startswith(SPOILT[what]) if SPOILT[what] else not found, answer
