"""Samples of a Dataset: the same ones in any process, on any number of instances and after a resume; mistakes told."""

import os
import random
import signal
import threading
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from threadpoolctl import threadpool_info
from torch.utils.data import IterableDataset, default_collate

from podium.checkpoints.reading import go_back
from podium.data.feed import Feed
from podium.data.padding import Pad, trimmed
from podium.data.sample_order import POOL_MICRO_BATCHES, order_by_length
from podium.data.source import SampleRequest, empty_buffers, start_gather
from podium.data.sources.dataset import DatasetSource
from podium.data.sources.mixed import MixedSource
from podium.data.sources.subset import subset
from podium.distributed.instances import Instances
from podium.errors import TrainingFailed, UserError
from podium.recipe.loading import load_recipe, recipe_from_tree
from podium.runs.folder import Run
from podium.topology import build_topology
from podium.train import resume, train
from tests.support import dataset_workload
from tests.support.crew import Crew
from tests.support.dataset_workload import Drawn
from tests.support.recipes import TINY

PROCESSES = (0, 1, 3)


class Samples:
    """A Dataset of a function of the number, in a test."""

    def __init__(self, make, num_samples: int = 10) -> None:
        self._make, self.num_samples = make, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index):
        return self._make(index)


def rows_of(source, samples, epoch: int | None = None) -> dict[str, np.ndarray]:
    samples = np.asarray(samples, np.int64)
    out = empty_buffers(source.fields, len(samples))
    start_gather(source, SampleRequest(samples, None if epoch is None else samples, epoch), out)()
    return out


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def drawn(workers: int, num_samples: int = 40) -> DatasetSource:
    return DatasetSource(Drawn(num_samples), seed=3, workers=workers, pad={"steps": Pad(16)})


# --- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", PROCESSES[1:])
def test_random_numbers_of_a_sample_do_not_depend_on_processes_or_on_what_came_before(workers):
    here, there = drawn(0), drawn(workers)
    everything = rows_of(here, range(40), epoch=2)
    assert_equal(rows_of(there, range(40), epoch=2), everything)
    some = [17, 3, 3, 39]
    assert_equal(rows_of(there, some, epoch=2), {name: rows[some] for name, rows in everything.items()})
    there.close()


def test_random_numbers_differ_by_epoch_sample_and_seed_and_are_fixed_outside_of_training():
    source = DatasetSource(Samples(lambda _: (torch.rand(2), np.random.rand(), random.random())), seed=1)
    first, second, fixed = rows_of(source, range(10), 0), rows_of(source, range(10), 1), rows_of(source, range(10))
    for name in source.fields:
        assert len({first[name].tobytes(), second[name].tobytes(), fixed[name].tobytes()}) == 3
        assert len(np.unique(first[name].reshape(10, -1), axis=0)) == 10
    assert_equal(rows_of(source, range(10)), fixed)
    other = DatasetSource(Samples(lambda _: (torch.rand(2), np.random.rand(), random.random())), seed=2)
    assert rows_of(other, range(10), 0)["target"].tobytes() != first["target"].tobytes()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_process_keeps_its_own_random_numbers_and_threads(workers):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    threads = torch.get_num_threads()
    source = drawn(workers)
    rows_of(source, range(5), epoch=0)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert torch.get_num_threads() == threads
    source.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_made_by_one_thread_wherever_that_is(workers):
    def make(index):
        blas = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
        return {"torch": torch.get_num_threads(), "blas": max(blas, default=1)}

    before = threadpool_info()
    source = DatasetSource(Samples(make), seed=0, workers=workers)
    rows = rows_of(source, range(4))
    assert (rows["torch"] == 1).all()
    assert (rows["blas"] == 1).all()
    assert threadpool_info() == before
    source.close()


def test_without_processes_samples_are_made_between_updates_by_the_thread_that_trains():
    seen = set()

    def make(index):
        seen.add(threading.current_thread())
        return torch.rand(1)

    source = DatasetSource(Samples(make), seed=0)
    blocks = iter([SampleRequest(np.arange(5)), SampleRequest(np.arange(5, 10))])
    with Feed(source, blocks, 5) as feed:
        assert [block.samples.tolist() for block in feed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert seen == {threading.current_thread()}


def test_a_generator_of_its_own_is_refused_as_it_could_not_be_the_same_twice():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"input of sample 0 of Samples differs .* take its seed from one of them"):
        DatasetSource(Samples(lambda _: rng.random(3)), seed=0)
    seeded = DatasetSource(Samples(lambda _: np.random.default_rng(np.random.randint(2**31)).random(3)), seed=0)
    assert_equal(rows_of(seeded, [4], 1), rows_of(seeded, [4], 1))


# --- what samples are made of -----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    size: float
    parts: list


@pytest.mark.parametrize(
    ("sample", "fields"),
    [
        (torch.zeros(2, 3), {"input": ((2, 3), "float32")}),
        ((np.zeros(4), 7), {"input": ((4,), "float32"), "target": ((), "int64")}),
        ((1, 2.5, True), {"input0": ((), "int64"), "input1": ((), "float32"), "target": ((), "bool")}),
        ({"a": [1, 2], "b": (1.0, [[1]])}, {"a": ((2,), "int64"), "b.0": ((), "float32"), "b.1": ((1, 1), "int64")}),
        (Pair(1, np.uint16(3)), {"left": ((), "int64"), "right": ((), "int32")}),
        (Record(1.0, [torch.ones(1), 2]),
         {"size": ((), "float32"), "parts.0": ((1,), "float32"), "parts.1": ((), "int64")}),
        (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True), {"input": ((2,), "float32")}),
    ],
)  # fmt: skip
def test_tensors_arrays_numbers_and_what_holds_them_become_fields(sample, fields):
    source = DatasetSource(Samples(lambda _: sample), seed=0)
    assert {name: (field.shape, np.dtype(field.dtype).name) for name, field in source.fields.items()} == fields
    rows_of(source, [1, 2])


def test_own_collate_sees_one_sample_at_a_time():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        batch = default_collate(samples)
        return {"image": batch[0] * 2, "label": batch[1]}

    source = DatasetSource(Samples(lambda index: (torch.full((2,), index), index)), seed=0, collate=collate)
    rows = rows_of(source, [3, 4])
    assert rows["image"].tolist() == [[6, 6], [8, 8]]
    assert rows["label"].tolist() == [3, 4]
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda index: "text", "input of sample 0 of Samples is a str: expected tensors"),
        (lambda index: (), "sample 0 of Samples is empty"),
        (lambda index: {"x": None}, "x of sample 0 of Samples is a NoneType"),
        (
            lambda index: torch.zeros(3 + (index == 6)),
            r"sample 6 of Samples has shape \(4,\), but that of sample 0 has",
        ),
        (lambda index: 1 if index < 6 else 1.5, "sample 6 of Samples is float64, but that of sample 0 is int64"),
        (lambda index: {"a": 1} if index < 6 else {"b": 1}, "sample 6 of Samples has no a, but sample 0 has"),
        (
            lambda index: (1, 2)[: 1 + (index < 6)],
            "sample 6 of Samples has other parts than sample 0: it should have 2",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_fit_are_told_with_their_number(make, message, workers):
    with pytest.raises(UserError, match=message) as told:
        rows_of(DatasetSource(Samples(make), seed=0, workers=workers), range(10))
    assert "\n" not in str(told.value)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_of_the_user_show_the_users_own_lines_only(workers):
    def inner(index):
        return {3: 1}[index]

    with pytest.raises(UserError) as told:
        rows_of(DatasetSource(Samples(lambda index: inner(index) if index else 0), seed=0, workers=workers), [2, 3])
    first, *lines = str(told.value).splitlines()
    assert first == "sample 2 of Samples raised KeyError: 2"
    assert len(lines) == 3  # __getitem__, the lambda, inner
    assert all(line.startswith("  ") and "test_dataset.py:" in line for line in lines)
    assert lines[-1].endswith("in inner: return {3: 1}[index]")


def test_a_process_that_dies_is_told_with_what_it_was_at_and_leaves_nothing_behind():
    me, before = os.getpid(), set(psutil.Process().children())
    source = DatasetSource(
        Samples(lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == 7 and os.getpid() != me else 0),
        seed=0,
        workers=2,
    )
    children = set(psutil.Process().children()) - before
    assert len(children) == 2
    for _ in range(2):  # also those who ask later
        with pytest.raises(TrainingFailed, match=r"of Samples was killed by SIGKILL while it prepared samples? .*7"):
            rows_of(source, [7] * 6)
    source.close()
    assert not children & set(psutil.Process().children())


def test_processes_end_with_their_source():
    before = set(psutil.Process().children())
    source = drawn(2)
    rows_of(source, range(3))
    children = set(psutil.Process().children()) - before
    assert len(children) == 2
    del source
    assert not children & set(psutil.Process().children())


def test_a_length_that_changes_is_refused():
    dataset = Samples(lambda index: index)
    source = DatasetSource(dataset, seed=0)
    dataset.num_samples = 9
    with pytest.raises(UserError, match="had 10 samples when it was opened and has 9 now"):
        rows_of(source, [0])


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize("dataset", [Stream(), (number for number in range(3))], ids=["torch", "generator"])
def test_iterable_datasets_are_refused_with_the_reason_and_the_way_out(dataset):
    with pytest.raises(
        UserError, match=r"is an iterable dataset: .* no numbers, .* write it once with .*write_indexed"
    ):
        DatasetSource(dataset, seed=0)


@pytest.mark.parametrize(("dataset", "message"), [(3, "int is not a Dataset"), ([], "list has no samples")])
def test_what_is_no_dataset_is_refused(dataset, message):
    with pytest.raises(UserError, match=message):
        DatasetSource(dataset, seed=0)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_padded_fields_have_a_mask_and_are_cut_to_the_longest_of_a_micro_batch():
    source = DatasetSource(
        Samples(lambda index: {"tokens": np.arange(index + 1), "label": index}), seed=0, pad={"tokens": Pad(12, -1)}
    )
    rows = rows_of(source, [2, 4])
    assert rows["tokens"].tolist() == [[0, 1, 2] + [-1] * 9, [0, 1, 2, 3, 4] + [-1] * 7]
    assert rows["tokens_mask"].sum(axis=1).tolist() == [3, 5]
    cut = trimmed({name: torch.from_numpy(array) for name, array in rows.items()}, multiple=4)
    assert cut["tokens"].shape == cut["tokens_mask"].shape == (2, 8)
    assert cut["label"].tolist() == [2, 4]
    assert source.lengths().tolist() == list(range(1, 11))


def test_samples_longer_than_their_padding_are_refused_or_cut():
    dataset = Samples(lambda index: torch.arange(index + 1))
    with pytest.raises(UserError, match=r"sample 5 of Samples has length 6, more than the 4 .* too_long='cut'"):
        rows_of(DatasetSource(dataset, seed=0, pad={"input": Pad(4)}), [5])
    assert rows_of(DatasetSource(dataset, seed=0, pad={"input": Pad(4, too_long="cut")}), [5])["input"].tolist() == [
        [0, 1, 2, 3]
    ]


def test_order_by_length_is_a_permutation_with_micro_batches_of_like_length():
    lengths = np.random.default_rng(0).integers(1, 500, 3001)
    micro, whole = 8, 3000
    samples = order_by_length(5, 1, np.arange(3001), lengths, micro)
    assert sorted(samples.tolist()) == list(range(3001))
    spread = np.ptp(lengths[samples[:whole].reshape(-1, micro)], axis=1)
    assert spread.mean() < 500 / POOL_MICRO_BATCHES * 2
    # Short and long micro-batches come in turn, and another epoch brings others together.
    means = lengths[samples[:whole]].reshape(-1, micro).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2
    other = order_by_length(5, 2, np.arange(3001), lengths, micro)
    groups = {frozenset(group) for group in samples[:whole].reshape(-1, micro).tolist()}
    assert not groups & {frozenset(group) for group in other[:whole].reshape(-1, micro).tolist()}
    # Any positions, asked for in any order.
    some = np.array([2999, 0, 1500, 511, 512])
    assert order_by_length(5, 1, some, lengths, micro).tolist() == samples[some].tolist()


# --- several datasets -------------------------------------------------------------------------------------------------


def mixed(workers: int = 0) -> MixedSource:
    parts = {
        name: DatasetSource(Samples(lambda i, n=name: (ord(n) * 100 + i, torch.rand(1)), size), seed=1, workers=workers)
        for name, size in (("a", 10), ("b", 30))
    }
    return MixedSource(parts, {"a": 0.7, "b": 0.3}, seed=2)


def test_a_mix_has_its_proportions_in_every_epoch_and_goes_through_each_dataset_evenly():
    source = mixed()
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for epoch in range(5):
        numbers = rows_of(source, range(len(source)), epoch)["input"]
        assert (numbers < 9800).sum() == 28
        for number in numbers.tolist():
            seen["ab"[number >= 9800]].append(number % 100)
    # 5 · 28 = 14 times all of a, 5 · 12 = twice all of b
    assert np.bincount(seen["a"]).tolist() == [14] * 10
    assert np.bincount(seen["b"]).tolist() == [2] * 30


def test_a_sample_that_comes_again_draws_other_random_numbers():
    rows = rows_of(mixed(), range(40), 0)
    of_a = rows["target"][rows["input"] < 9800]
    assert len(np.unique(of_a)) == len(of_a) == 28


def test_a_mix_is_the_same_with_processes_and_in_parts():
    whole = rows_of(mixed(), range(40), 3)
    parts = mixed(workers=1)
    assert_equal(rows_of(parts, [38, 2, 5], 3), {name: rows[[38, 2, 5]] for name, rows in whole.items()})


def test_a_mix_of_unequal_fields_or_names_is_refused():
    one = DatasetSource(Samples(lambda _: 1), seed=0)
    two = DatasetSource(Samples(lambda _: 1.0), seed=0)
    with pytest.raises(UserError, match="the samples of b and a differ: input float32"):
        MixedSource({"a": one, "b": two}, {"a": 1, "b": 1}, seed=0)
    with pytest.raises(UserError, match="mix names c, but the datasets are a"):
        MixedSource({"a": one}, {"c": 1}, seed=0)
    with pytest.raises(UserError, match="expected weights greater than 0"):
        MixedSource({"a": one}, {"a": 0}, seed=0)


def test_a_subset_of_a_dataset_has_its_epochs():
    source = drawn(0)
    half = subset(source, np.arange(1, 40, 2))
    assert_equal(rows_of(half, [3], epoch=1), rows_of(source, [7], epoch=1))
    assert half.lengths().tolist() == source.lengths()[1::2].tolist()


# --- trainings --------------------------------------------------------------------------------------------------------


def recipe_tree(**data: object) -> dict:
    shuffle = data.pop("shuffle", "global")
    return {
        "workload": {"name": dataset_workload.NAME, "data": data},
        "batch": {"micro": 3, "accumulation": 2, "replicas": 4, "shuffle": shuffle},
        "train": {"length": "12up"},
        "optim": {"name": "adamw", "lr": 0.01},
        "valid": {"every": "4up", "micro": 5},
        "checkpoint": {"every": "5up", "keep": 9},
        "engine": {"threads": 1},
        "log": {"report": False, "tensorboard": False},
    }


def trained(instances: Instances, folder: Path, data: dict) -> str:
    """Runs in the crew."""
    recipe = recipe_from_tree(recipe_tree(**data))
    topology = build_topology(recipe.batch.num_replicas, instances.count)
    return train(recipe, folder, topology, instances).summary()["weights_sha256"]


FORMS = {
    "global": {},
    "length": {"shuffle": "length"},
    "mix": {"mix": {"a": 0.7, "b": 0.3}, "shuffle": "length"},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: trained(Instances.alone(), folder / name, data) for name, data in FORMS.items()}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_the_same_with_processes(form, alone, tmp_path):
    assert len(set(alone.values())) == len(FORMS)
    assert trained(Instances.alone(), tmp_path / "run", {**FORMS[form], "workers": 2}) == alone[form]


@pytest.mark.slow
def test_weights_are_the_same_on_any_number_of_instances(alone, tmp_path):
    crew = Crew(4, __name__)
    for count, workers in ((2, 0), (4, 1)):
        crew.join(count)
        for form, data in FORMS.items():
            folder = tmp_path / f"{form}-{count}"
            assert crew.run(trained, folder, {**data, "workers": workers})[0] == alone[form], (count, form)
    crew.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_are_the_same_after_a_resume(workers, alone, tmp_path):
    recipe = recipe_from_tree(recipe_tree(mix={"a": 0.7, "b": 0.3}, shuffle="length", workers=workers))
    run = train(recipe, tmp_path / "run")
    go_back(run.checkpoints, 5)
    run = resume(Run(tmp_path / "run"), recipe)
    assert run.summary()["weights_sha256"] == alone["mix"]


def test_an_error_in_a_sample_leaves_no_run_behind_where_it_shows_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Drawn, "__getitem__", lambda self, index: {}[index])
    with pytest.raises(UserError, match="sample 0 of Drawn raised KeyError: 0"):
        train(recipe_from_tree(recipe_tree()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_order_by_length_needs_lengths(tmp_path):
    name, *overrides = TINY["mnist"]
    with pytest.raises(UserError, match=r"batch.shuffle = length: the samples of this workload have no lengths"):
        train(load_recipe(name, [*overrides, "batch.shuffle=length"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
