"""The first promise, in real processes: the same bits on any number of instances."""

import gc
import math
import os
import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from podium.contract import Loss, by_dimension
from podium.distributed import connecting, shared_memory
from podium.distributed import instances as instances_module
from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.distributed.reduction import exact, summed_buffers, uneven_buffers
from podium.distributed.sharding.gather_tensors import GatheredTensors, send_pieces
from podium.engine.losses import PendingLosses
from podium.errors import UserError
from podium.optim.optimisers import build_optimiser
from podium.optim.state_tensors import state_tensors
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.replica_tree import deal, subtrees
from tests.support.crew import Crew
from tests.support.engines import small_engine
from tests.support.trees import tree_of

#: the instances on each host, which share memory
EVEN = [(1,) * 2, (1,) * 4, (1,) * 8, (2,), (4,), (8,), (2,) * 4]
UNEVEN = [(3,), (7,), (1, 3), (3, 2, 1), (1,) * 3, (1,) * 5]
PLACES = EVEN + UNEVEN
#: real processes: no deadline, and few examples where each costs milliseconds of messages
MESSAGES = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def crew():
    crew = Crew(max(map(sum, PLACES)), __name__)
    yield crew
    crew.close()


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: "-".join(map(str, place)))
def joined(request, crew) -> Crew:
    """A run of so many instances; tests of the same hosts share it."""
    crew.host_sizes, crew.count = request.param, sum(request.param)
    crew.join_hosts(crew.host_sizes)
    return crew


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


# Sums of any tensors


def leaf(index: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """What replica `index` has: values over many magnitudes, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed * 1000 + index)
    exponents = torch.randint(-12, 13, (size,), generator=generator)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 10.0**exponents
    kind = torch.randint(0, 12, (size,), generator=generator)
    values[kind == 0] = 0.0
    values[kind == 1] = -0.0
    return values.to(dtype)


def sum_on_instances(
    instances: Instances, num_replicas: int, cases: list, limits: dict[str, int]
) -> tuple[str, list[bytes]]:
    own = subtrees(deal(num_replicas, instances.count)[instances.index], num_replicas)
    with ExitStack() as stack:  # put back afterwards: the next test may have more instances, and all need the same
        for module in (instances_module, summed_buffers, uneven_buffers):
            ours = {name: value for name, value in limits.items() if hasattr(module, name)}
            if ours:
                stack.enter_context(mock.patch.multiple(module, **ours))
        sizes = [(size, dtype) for size, _, dtype in cases]
        summed = summed_buffers.summed_buffers(instances, num_replicas, sizes, torch.device("cpu"), num_lanes=2)
        answers = []
        for turn, (number, (size, seed, dtype)) in product(range(len(summed.sets) + 1), enumerate(cases)):
            filled, totals = summed.sets[turn % len(summed.sets)]
            for flats, part in zip((*summed.complete, filled), own, strict=True):
                flats[number].copy_(tree_of([leaf(index, size, seed + turn, dtype) for index in part]))
            summed.sum(number, number % 2)
            answers.append(totals[number].view(torch.uint8).numpy().tobytes() if size else b"")
            totals[number].fill_(-1.0)  # as an optimiser, while others may still read what this one summed
        return type(summed).__name__, answers


DOUBLING = {
    "DOUBLING_BYTES": 1 << 40,
    "ROUND_BYTES": 1 << 40,
    "PIECE_BYTES": 1 << 20,
    "WHOLE_BYTES": 1 << 40,
    "MORE_BYTES": 1 << 40,
}
HALVING = {"DOUBLING_BYTES": -1, "ROUND_BYTES": 0, "PIECE_BYTES": 1 << 20, "WHOLE_BYTES": 0, "MORE_BYTES": -1}
PIECES = {"DOUBLING_BYTES": -1, "ROUND_BYTES": 0, "PIECE_BYTES": 1000, "WHOLE_BYTES": 0, "MORE_BYTES": -1}
ONE_SET = {"TURNS_BYTES": 0}


@pytest.mark.parametrize(
    "limits", [DOUBLING, HALVING, PIECES, ONE_SET], ids=["doubling", "halving", "pieces", "one set"]
)
@MESSAGES
@given(
    more=st.integers(0, 9),
    sizes=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_sum_of_any_tensors_equals_the_tree_of_one_process(joined, limits, more, sizes, seed, dtype):
    num_replicas = joined.count + more
    cases = [(size, seed + number, dtype) for number, size in enumerate(sizes)]
    kinds, answers = zip(*joined.run(sum_on_instances, num_replicas, cases, limits), strict=True)
    alike = "SentBuffers" if max(joined.host_sizes) == 1 else "SharedBuffers"
    assert set(kinds) == {alike if joined.host_sizes in EVEN else "UnevenBuffers"}
    num_turns = len(answers[0]) // len(cases)
    for (turn, (size, case_seed, _)), *sums in zip(product(range(num_turns), cases), *answers, strict=True):
        expected = tree_of([leaf(index, size, case_seed + turn, dtype) for index in range(num_replicas)])
        assert set(sums) == {expected.view(torch.uint8).numpy().tobytes() if size else b""}


# The engine


class Squares:
    """The loss of a workload that is nothing else; replicas may have counts of their own."""

    def loss(self, model: nn.Module, batch) -> Loss:
        output = model(batch["input"])
        return Loss(((output - batch["target"]) ** 2).sum(), len(output), {"size": (output.abs().sum(), len(output))})


class Net(nn.Module):
    """Everything that has to come out the same: a channels-last weight, batch norm, dropout, a frozen and an unused
    parameter, one that only some replicas use, a constant, a count of the passes."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm1d(6 * 4)
        self.linear = nn.Linear(6 * 4, 30)
        self.frozen = nn.Parameter(torch.ones(30), requires_grad=False)
        self.output = nn.Linear(30, 2)
        self.plain = plain
        if not plain:
            self.unused = nn.Parameter(torch.ones(3))
            self.sometimes = nn.Parameter(torch.zeros(30))
        self.register_buffer("constant", torch.tensor([0.1, 0.7]))
        self.register_buffer("passes", torch.tensor(0.1))
        self.to(memory_format=torch.channels_last)

    def forward(self, input):
        if self.training:
            self.passes += 0.1
        hidden = self.linear(self.norm(self.conv(input).flatten(1)))
        hidden = nn.functional.dropout(hidden.relu(), 0.3, self.training) * self.frozen
        if not self.plain and input[0, 0, 0, 0] > 0:
            hidden = hidden + self.sometimes
        return self.output(hidden)


def trained(
    instances: Instances,
    num_replicas: int,
    reduction: str = "exact",
    optimiser_name: str = "adamw",
    plain: bool = False,
    stop_at: int = -1,
) -> dict:
    exact.FIRST_BYTES, exact.BUCKET_BYTES = 64, 1000  # several buckets, also of a small model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net(plain).train()
    optimiser = build_optimiser(OptimSection(name=optimiser_name, lr=0.01), model, by_dimension(model))
    replicas = deal(num_replicas, instances.count)[instances.index]
    waits: list[float] = []
    batch = BatchSection(micro=4, accumulation=2, replicas=num_replicas)
    engine = small_engine(
        model, Squares(), optimiser, batch, 5, clip_norm=0.5, instances=instances, reduction=reduction,
        waited=waits.append,
    )  # fmt: skip
    stops, losses = [], []
    for update in range(5):
        generator = torch.Generator().manual_seed(update)
        samples = {
            "input": torch.randn(num_replicas, 2, 4, 2, 4, 4, generator=generator),
            "target": torch.randn(num_replicas, 2, 4, 2, generator=generator),
        }
        local = {name: rows[replicas.start : replicas.stop] for name, rows in samples.items()}
        stops.append(engine.update(update, local, 0.01, stop=update == stop_at and instances.index == 0))
        if update in (1, 4):
            losses.append(engine.collect())
    return {
        "weights": {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        "optimiser": {name: tensor.numpy() for name, tensor in state_tensors(optimiser).items()},
        "losses": losses,
        "means": [sums.means() for sums in losses],
        "stops": stops,
        "num_waits": len(waits),
    }


def assert_same_bits(ours: dict, theirs: dict) -> None:
    for part in ("weights", "optimiser"):
        assert ours[part].keys() == theirs[part].keys()
        for name, array in theirs[part].items():
            assert ours[part][name].tobytes() == array.tobytes(), name
    assert ours["losses"] == theirs["losses"]
    assert ours["means"] == theirs["means"]


@pytest.mark.parametrize("num_replicas", [8, 24])
def test_any_number_of_instances_gives_the_same_bits(joined, num_replicas):
    alone = trained(Instances.alone(), num_replicas)
    for answer in joined.run(trained, num_replicas):
        assert_same_bits(answer, alone)
        assert answer["num_waits"] == 5
    assert alone["num_waits"] == 0


def one_replica_each(instances: Instances) -> dict:
    return trained(instances, instances.count)


def test_one_replica_on_each_instance_gives_the_same_bits(joined):
    answers = joined.run(one_replica_each)
    alone = trained(Instances.alone(), len(answers))
    for answer in answers:
        assert_same_bits(answer, alone)


@pytest.mark.slow
@pytest.mark.parametrize("optimiser_name", ["momentum", "rmsprop", "adam"])
def test_same_bits_for_every_optimiser(joined, optimiser_name):
    alone = trained(Instances.alone(), 16, "exact", optimiser_name)
    for answer in joined.run(trained, 16, "exact", optimiser_name):
        assert_same_bits(answer, alone)


def test_constants_and_unused_parameters_stay_as_they_are(joined):
    for answer in joined.run(trained, 24):
        assert answer["weights"]["constant"].tolist() == np.float32([0.1, 0.7]).tolist()
        assert answer["weights"]["frozen"].tolist() == [1.0] * 30
        assert not answer["optimiser"]["exp_avg/unused"].any()
        assert answer["optimiser"]["exp_avg/sometimes"].any()


def test_fast_is_close_but_not_the_same(joined):
    # Momentum, as Adam makes steps of full size from the rounding noise of a bias in front of a batch norm.
    alone = trained(Instances.alone(), 8, "exact", "momentum", True)
    answers = joined.run(trained, 8, "fast", "momentum", True)
    for answer in answers:
        assert_same_bits({**answer, "losses": [], "means": []}, {**answers[0], "losses": [], "means": []})
        for name, array in alone["weights"].items():
            np.testing.assert_allclose(answer["weights"][name], array, rtol=1e-3, atol=1e-4)
    assert any(answers[0]["weights"][name].tobytes() != array.tobytes() for name, array in alone["weights"].items())


def fast_without_all_gradients(instances: Instances) -> bool:
    try:
        trained(instances, 8, "fast")
    except UserError as error:
        return "exact" in str(error)
    return False


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_all_instances_stop_in_the_update_in_which_one_asks(joined, reduction):
    for answer in joined.run(trained, 8, reduction, "adamw", True, 3):
        assert answer["stops"] == [False, False, False, True, False]
    assert trained(Instances.alone(), 8, reduction, "adamw", True, 3)["stops"] == [False, False, False, True, False]


# Losses


def collect_uneven(instances: Instances, num_parts: int) -> list:
    pending = PendingLosses()
    for part in range(instances.index, num_parts, instances.count):
        pending.add(part_of_validation(part))
    first = pending.collect(instances)
    return [first.means(), sorted(first.parts["loss"]) if first.parts else [], pending.collect(instances).parts]


def part_of_validation(part: int) -> Loss:
    value = torch.tensor(0.1 * 7.0**part)
    return Loss(value, part + 1, {"accuracy": (torch.tensor(part, dtype=torch.int64), part + 1)})


@pytest.mark.parametrize("num_parts", [0, 1, 3, 8, 13])
def test_validation_sums_are_exact_however_the_parts_are_dealt_out(joined, num_parts):
    alone = collect_uneven(Instances.alone(), num_parts)
    assert alone[2] == {}
    for answer in joined.run(collect_uneven, num_parts):
        assert answer == alone


def collect_not_finite(instances: Instances) -> list[float]:
    pending = PendingLosses()
    if instances.index == 0:
        pending.add(Loss(torch.tensor(math.nan), 1, {"inf": (torch.tensor(-math.inf), 1)}))
    means = pending.collect(instances).means()
    return [means["loss"], means["inf"]]


def test_values_that_are_not_finite_arrive(joined):
    for loss, inf in joined.run(collect_not_finite):
        assert math.isnan(loss)
        assert inf == -math.inf


def gather_and_meet(instances: Instances) -> tuple:
    instances.barrier()
    empty = instances.gather(torch.empty(0, 3))
    return instances.gather(torch.full((2, 1), instances.index)).tolist(), tuple(empty.shape)


def test_gather_keeps_the_order_of_instances(joined):
    expected = [[[index], [index]] for index in range(joined.count)], (joined.count, 0, 3)
    assert joined.run(gather_and_meet) == [expected] * joined.count


# Faults; last, as they leave groups that nobody can use any more


def test_fast_says_when_it_cannot(crew):
    crew.join(2)
    assert crew.run(fast_without_all_gradients) == [True, True]


def train_without_the_last(instances: Instances) -> tuple[int | None, float] | None:
    if instances.index == instances.count - 1:
        return None
    began = time.monotonic()
    try:
        trained(instances, 8)
    except InstanceLost as error:
        return error.instance, time.monotonic() - began
    return None


def test_a_silent_instance_is_named_in_time(crew):
    """The error of the thread that carries gradients is raised where training waits for it."""
    crew.join(2, timeout_s=1.5)
    (instance, seconds), _ = crew.run(train_without_the_last)
    assert instance == 1
    assert seconds < 30  # where all have 60 s unless told otherwise


# Shared memory


def kind_of_buffers(instances: Instances, unseen_by: int | None) -> str:
    def unseen(*args: object) -> None:
        raise PermissionError("another user's")

    with mock.patch.object(shared_memory.Segment, "opened", unseen) if instances.index == unseen_by else nullcontext():
        return type(summed_anew(instances)).__name__


def summed_anew(instances: Instances) -> summed_buffers.Buffers:
    sizes = [(100_000, torch.float32)]
    return summed_buffers.summed_buffers(instances, instances.count, sizes, torch.device("cpu"), num_lanes=1)


def test_memory_is_shared_by_all_instances_or_by_none(crew):
    crew.join(4, num_per_host=2)
    assert crew.run(kind_of_buffers, None) == ["SharedBuffers"] * 4
    assert crew.run(kind_of_buffers, 3) == ["SentBuffers"] * 4
    crew.join_hosts((1, 3))
    assert crew.run(kind_of_buffers, None) == ["UnevenBuffers"] * 4
    assert crew.run(kind_of_buffers, 3) == ["SentBuffers"] * 4


class Fixed(Squares):
    fixed = True


def trained_replaying(instances: Instances, num_replicas: int) -> tuple[list[bytes], int, int]:
    """Return (the weights, how many passes were compared, how many recorded gradients lie in what others read)."""
    exact.FIRST_BYTES, exact.BUCKET_BYTES = 64, 1000
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = build_optimiser(OptimSection(name="momentum", lr=0.01), model, by_dimension(model))
    replicas = deal(num_replicas, instances.count)[instances.index]
    batch = BatchSection(micro=4, replicas=num_replicas)
    engine = small_engine(model, Fixed(), optimiser, batch, 5, instances=instances)
    for update in range(9):
        generator = torch.Generator().manual_seed(update)
        samples = {"input": torch.randn(num_replicas, 1, 4, 6, generator=generator)}
        samples["target"] = torch.randn(num_replicas, 1, 4, 2, generator=generator)
        engine.update(update, {name: rows[replicas.start : replicas.stop] for name, rows in samples.items()}, 0.01)
    replay = engine._replicas.replay
    sets = getattr(engine._parallelism._reduction, "_sets", [])
    shared = {view.untyped_storage().data_ptr() for memories in sets for memory in memories for view in memory.views}
    inside = [grad for grad in replay._recorded._grads if grad.untyped_storage().data_ptr() in shared]
    return [bits(param) for param in model.parameters()], replay._num_equal, len(inside)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_recorded_passes_leave_the_memory_that_others_read_alone(crew, num_replicas):
    weights, num_equal, _ = trained_replaying(Instances.alone(), num_replicas)
    crew.join(2, num_per_host=2)
    assert crew.run(trained_replaying, num_replicas) == [(weights, num_equal, 0)] * 2
    assert num_equal > 0


def num_segments(instances: Instances) -> list[int]:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:podium-instances")

    before = num_mapped()  # those of what instances tell each other
    summed = summed_anew(instances)
    summed.sum(0, 0)
    during = num_mapped()
    del summed
    return [during - before, num_mapped() - before]


def test_shared_memory_goes_with_the_engine(crew):
    crew.join(2, num_per_host=2)
    assert crew.run(num_segments) == [[2, 0]] * 2


def sum_without_the_last(instances: Instances, ends: bool) -> tuple[int | None, str] | None:
    summed = summed_anew(instances)
    if instances.index == instances.count - 1:
        if ends:
            threading.Timer(0.3, os._exit, (9,)).start()
        return None
    try:
        summed.sum(0, 0)
    except InstanceLost as error:
        return error.instance, str(error)
    return None


def test_a_mate_that_is_silent_or_gone_is_named():
    crew = Crew(2, __name__)
    crew.join(2, timeout_s=1.5, num_per_host=2)
    assert crew.run(sum_without_the_last, False) == [(1, "instance 1 is lost: no answer in 1.5 s"), None]
    crew.join(2, timeout_s=60, num_per_host=2)
    assert crew.run(sum_without_the_last, True) == [(1, "instance 1 is lost: its process has ended"), None]
    crew.close()


class NobodyLost:
    """The membership of a run that loses nobody."""

    def has_lost(self) -> bool:
        return False


def sum_that_one_is_late_for(instances: Instances, port: int, late_s: float) -> float:
    """In a group that has come about while the run was under way, over hosts of one instance each."""
    store = dist.PrefixStore(f"late-{instances.count}", dist.TCPStore("127.0.0.1", port, is_master=False))
    index, count = instances.index, instances.count
    with mock.patch.object(connecting, "_CONNECT_S", late_s / 2):
        group = Instances.join(store, index, count, 60, (1,) * count, is_over=lambda: False)
    group.membership = NobodyLost()  # type: ignore[assignment]
    summed = summed_buffers.summed_buffers(group, count, [(1000, torch.float32)], torch.device("cpu"))
    summed.sets[0].flats[0].fill_(index + 1)
    if index == 0:
        time.sleep(late_s)
    summed.sum(0, 0)
    group.close()
    return float(summed.sets[0].totals[0].sum()) / 1000


@pytest.mark.parametrize("count", [2, 3])
def test_the_time_to_connect_is_not_that_of_messages(count):
    crew = Crew(count, __name__)
    crew.join(count, num_per_host=count)
    assert crew.run(sum_that_one_is_late_for, crew._store.port, 2.0) == [sum(range(1, count + 1))] * count
    crew.close()


# What instances tell each other


def told(instances: Instances, mail_bytes: int, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[bytes]:
    answers = []
    with mock.patch.object(instances_module, "EXCHANGE_BYTES", mail_bytes):
        for shape, dtype in shapes:
            own = (torch.arange(math.prod(shape)).reshape(shape) * 7 + instances.index).to(dtype)
            gathered = instances.gather(own)
            assert gathered.shape == (instances.count, *shape)
            assert gathered.dtype == dtype
            instances.barrier()
            instances.broadcast(own)
            answers += [bytes(values.flatten().view(torch.uint8).tolist()) for values in (gathered, own)]
    return answers


def has_gloo(instances: Instances) -> bool:
    return any(thread.read_text() == "gloo_tcp_loop\n" for thread in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.parametrize("count", [2, 4])
def test_shared_memory_carries_what_messages_would(crew, count):
    """In any piece of mail: values of one byte and of eight, of no dimension, none at all, longer than the mail."""
    shapes = [
        ((), torch.bool),
        ((3,), torch.int64),
        ((0, 4), torch.float32),
        ((5, 7), torch.float64),
        ((1,), torch.uint8),
    ]
    answers = []
    for num_per_host in (1, count):
        crew.join(count, num_per_host=num_per_host)
        for mail_bytes in (16, 1 << 20):
            answers.append(crew.run(told, mail_bytes, shapes))
    assert all(answer == answers[0] for answer in answers)
    assert all(of_instance[1::2] == answers[0][0][1::2] for of_instance in answers[0])  # that of instance 0, in all


def test_gloo_is_there_when_something_needs_it():
    """It takes a part of a core from the training."""
    crew = Crew(2, __name__)
    crew.join(2, num_per_host=2)
    crew.run(trained, 8)
    assert crew.run(has_gloo) == [False, False]
    crew.run(fast_without_all_gradients)
    assert crew.run(has_gloo) == [True, True]
    crew.close()


def held_by_one(instances: Instances) -> dict[str, list[float]] | None:
    parts = GatheredTensors(instances, {"held": torch.tensor([1.0, 2.0])} if instances.index == 2 else {})
    if instances.index > 0:
        send_pieces(parts)
        return None
    return {name: values.tolist() for name, values in parts.gathered()}


def test_two_of_four_talk_alone(crew):
    """The group is there before: all are needed to make it."""
    crew.join(4, num_per_host=4)
    assert crew.run(held_by_one) == [{"held": [1.0, 2.0]}, None, None, None]


def waits_suspended(instances: Instances) -> None:
    if instances.index == 1:
        time.sleep(0.6)
    instances.barrier()


def test_time_that_all_are_suspended_does_not_count(crew):
    crew.join(2, timeout_s=1.5, num_per_host=2)
    timers = [
        threading.Timer(0.3, crew.signal, (signal.SIGSTOP,)),
        threading.Timer(2.3, crew.signal, (signal.SIGCONT,)),
    ]
    for timer in timers:
        timer.start()
    began = time.monotonic()
    crew.run(waits_suspended)
    assert time.monotonic() - began > 2.0
