"""Trainings on pretended devices: the same bits as on the CPU, with one instance and with several."""

from functools import cache

import pytest

from podium.optim.steps import KERNELS
from tests.support import pretend
from tests.support.recipes import TINY, eight

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())]

_SHORT = ("train.length=4up", "valid.every=2up", "checkpoint.every=2up", "schedule.warmup=1up", *pretend.SAME_BITS)
_HALF = [f"precision.{key}" for key in ("mode=16.16", "half=fp16", "loss_scale=auto")]


def of_eight(workload, *more):
    """Three updates of eight replicas, which clip their gradients. Where images are mixed, what decides how is drawn on
    the host, from the generator that on a CPU draws all, so the bits of a device are others there."""
    host_draws = ["workload.data.augment.cutmix=0"] if workload == "cnn" else []
    return [*eight(workload), "train.length=3up", "valid.every=2up", *pretend.SAME_BITS, *host_draws, *more]


#: one of each arithmetic
OPTIMISERS = list({kernel: name for name, (kernel, _) in KERNELS.items()}.values())


def _by(optimiser):
    return [f"optim.name={optimiser}", "optim.clip_norm=0.5", "optim.lr=0.01"]


ALONE = {
    **{f"{name}/32.32": [*recipe, *_SHORT] for name, recipe in TINY.items()},
    **{f"{name}/32.32+": [*recipe, *_SHORT, "train.length=6up"] for name, recipe in TINY.items()},
    **{f"{name}/16.32": [*recipe, *_SHORT, "precision=16.32"] for name, recipe in TINY.items()},
    **{f"{name}/16.16": [*recipe, *_SHORT, "precision=16.16"] for name, recipe in TINY.items()},
    **{f"{name}/fp16": [*recipe, *_SHORT, *_HALF] for name, recipe in TINY.items() if name in ("mnist", "gpt2")},
    **{f"{name}/eight": of_eight(name) for name in TINY},
    **{
        f"{name}/{optimiser}/{mode}": [*TINY[name], *_SHORT, "train.length=2up", *_by(optimiser), f"precision={mode}"]
        for name in ("mnist", "gpt2")
        for optimiser in OPTIMISERS
        for mode in ("32.32", "16.32", "16.16")
    },
    **{  # the layout that CUDA devices have in half precision
        f"{name}/channels last/{mode}": [*TINY[name], *_SHORT, "engine.layout=channels_last", f"precision={mode}"]
        for name in ("cnn", "mnist", "neuron")
        for mode in ("16.32", "16.16")
    },
    "neuron/average": of_eight("neuron", "average.method=exponential", "valid.recalibrate=2", "checkpoint.every=1up"),
    "neuron/average+": of_eight(
        "neuron", "average.method=exponential", "valid.recalibrate=2", "checkpoint.every=1up", "train.length=5up"
    ),
}  # fmt: skip
TOGETHER = {f"{name}/eight": of_eight(name) for name in TINY} | {
    "cnn/span": of_eight("cnn", "workload.model.norm.span=8"),
    "neuron/shard": of_eight("neuron", "parallel.shard=optimiser"),
    "bert/stages": of_eight("bert", "parallel.stages=2"),
    "gpt2/stages": of_eight("gpt2", "parallel.stages=2", "parallel.schedule=grouped"),
}
_FAST = "engine.reduction=fast"
#: with torch's reduction, whose bits depend on the number of instances
FAST = {
    "mnist/fast": of_eight("mnist", _FAST),
    "neuron/optimiser": of_eight("neuron", _FAST, "parallel.shard=optimiser"),
    "mnist/parameters": of_eight("mnist", _FAST, "parallel.shard=parameters"),
    "gpt2/parameters": of_eight("gpt2", _FAST, "parallel.shard=parameters", "precision=16.32"),
    "neuron/parameters": of_eight("neuron", _FAST, "parallel.shard=parameters", "optim.name=adamw"),
}
#: with three, blocks of replicas are of different sizes
OF_THREE = {name: TOGETHER[name] for name in ("neuron/eight", "gpt2/eight")}
#: what does not belong to a CPU, or to one instance
_UNCUT = ("parallel.stages=1", "parallel.shard=none")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    recipes = ALONE | {name: [*recipe, *_UNCUT] for name, recipe in TOGETHER.items()}
    return pretend.trained(tmp_path_factory.mktemp("cpu"), recipes, 1, 0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return pretend.trained(tmp_path_factory.mktemp("device"), ALONE, 1, 2)


@pytest.fixture(scope="module")
def fast_on_cpus(tmp_path_factory):
    return cache(lambda count: pretend.trained(tmp_path_factory.mktemp(f"cpus-{count}"), FAST, count, 0))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    known = {}

    def with_count(count):
        if count not in known:
            trainings = OF_THREE if count == 3 else TOGETHER | FAST
            known[count] = pretend.trained(tmp_path_factory.mktemp(f"devices-{count}"), trainings, count)
        return known[count]

    return with_count


def assert_equal(got, expected):
    assert "error" not in got, got["error"]
    assert (got["weights"], got["valid"]) == (expected["weights"], expected["valid"])


@pytest.mark.parametrize("name", ALONE)
def test_a_device_has_the_bits_of_the_cpu(name, alone, on_cpu):
    assert_equal(alone[name], on_cpu[name])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", TOGETHER)
def test_several_devices_have_the_bits_of_one(name, count, together, on_cpu):
    assert_equal(together(count)[name], on_cpu[name])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", FAST)
def test_fast_reduction_has_the_bits_of_as_many_cpus(name, count, together, fast_on_cpus, on_cpu):
    got = together(count)[name]
    assert_equal(got, fast_on_cpus(count)[name])
    if name == "mnist/fast":
        assert got["valid"]["last"]["loss"] == pytest.approx(on_cpu["mnist/eight"]["valid"]["last"]["loss"], rel=1e-4)
    kinds = {what for of_one in got["messages"] for what, *_ in of_one}
    assert ({"allgather", "reduce_scatter"} <= kinds) == name.endswith("/parameters")


@pytest.mark.parametrize("name", OF_THREE)
def test_blocks_of_different_sizes_do_not_change_the_bits(name, together, on_cpu):
    assert_equal(together(3)[name], on_cpu[name])


@pytest.mark.parametrize("name", [name for name in TOGETHER if name.endswith("/eight")])
def test_messages_are_batches_beside_the_passes_in_one_order(name, together):
    """What one sends is what the other expects, in its order; nobody posts anything before the batch before is complete
    on both sides, which a device's backend would wait for."""
    messages = together(2)[name]["messages"]
    kinds = {what for of_one in messages for what, *_ in of_one}
    assert kinds <= {"begin", "end", "send", "recv"}
    sent, received = (
        [[size for what, _, size, _ in of_one if what == kind] for of_one in messages] for kind in ("send", "recv")
    )
    assert sent[0] == received[1]
    assert sent[1] == received[0]
    num_updates = 3
    assert len(sent[0]) % num_updates == 0
    assert sent[0] == sent[0][: len(sent[0]) // num_updates] * num_updates
    for index, of_one in enumerate(messages):
        assert [what for what, *_ in of_one] == ["begin", "recv", "send", "end"] * len(sent[0])
        assert {other for what, other, *_ in of_one if what in ("send", "recv")} == {1 - index}
        assert all(stream != 0 for *_, stream in of_one), "in line with the passes"


def test_rows_that_nobody_looks_at_are_left_out_on_a_device_too(tmp_path):
    """Which is a saving of no layout; the bits show that it is in use."""
    recipe = [word for word in ALONE["bert/32.32"] if not word.startswith("engine.kernels")]
    found = pretend.trained(tmp_path, {"all": recipe, "off": [*recipe, "engine.kernels=off"],
                                       "rows": [*recipe, "engine.kernels=[few_rows]"]}, 1)  # fmt: skip
    assert found["rows"]["weights"] == found["all"]["weights"] != found["off"]["weights"]
