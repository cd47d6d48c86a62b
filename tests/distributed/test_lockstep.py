"""Replicas side by side: the same bits however they are spread over instances, and no hang when one fails."""

import gc
import threading
import traceback
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from podium.contract import Loss, by_dimension
from podium.distributed import span_sums
from podium.distributed.instances import Instances
from podium.distributed.lockstep import Lockstep, run_in_lockstep, sum_over_instances, twin
from podium.errors import UserError
from podium.layers.norm import SpanBatchNorm, current_span
from podium.optim.optimisers import build_optimiser
from podium.optim.state_tensors import state_tensors
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.replica_tree import deal
from tests.support.crew import Crew
from tests.support.engines import small_engine

REPLICAS = 4
Seen = list[dict[str, np.ndarray]]


def exchanged(value: float, num_replicas: int = 2) -> float:
    return current_span().exchange(torch.tensor([value]), num_replicas).item()


def network(span: int) -> nn.Module:
    """Dropout before and after norms, one of them over a smaller span."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.Dropout(0.3),
        SpanBatchNorm(5, span),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(5 * 4, 6),
        SpanBatchNorm(6, 2),
        nn.Dropout(0.3),
        nn.Linear(6, 3),
    )


def one_replica(model: nn.Module, replica: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two micro-batches of one replica: everything that must not depend on who carries it."""
    seen = {}
    for index in range(2):
        x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(10 * replica + index))
        torch.manual_seed(100 * replica + index)
        y = model(x.to(dtype))
        y.square().sum().backward()
        seen |= {f"output {index}": y.detach(), f"draw {index}": torch.rand(3)}
    seen |= {f"grad of {name}": param.grad for name, param in model.named_parameters()}
    return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


def local_replicas(instances: Instances, span: int, dtype: torch.dtype = torch.float32) -> Seen:
    """What this instance's replicas see, group after group."""
    model = network(span).to(dtype)
    local = deal(REPLICAS, instances.count)[instances.index]
    size = min(span, len(local))
    seen = []
    with Lockstep(size, sum_over_instances(instances, REPLICAS)) as lockstep:
        for start in range(local.start, local.stop, size):
            replicas = [(twin(model), replica, dtype) for replica in range(start, start + size)]
            seen += lockstep.run([lambda of=of: one_replica(*of) for of in replicas])
    return [{name: tensor.numpy() for name, tensor in replica.items()} for replica in seen]


def assert_same(ours: Seen, theirs: Seen) -> None:
    assert len(ours) == len(theirs)
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].tobytes() == b[name].tobytes(), f"{place}: {name}"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def crew():
    crew = Crew(4, __name__)
    yield crew
    crew.close()


@pytest.fixture(scope="module", params=[2, 3, 4])
def joined(request, crew) -> Crew:
    """Runs of so many instances, 3 with different numbers of replicas; tests of the same number share one."""
    crew.join(request.param)
    crew.count = request.param
    return crew


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("span", [2, 4])
def test_outputs_gradients_and_statistics_have_the_same_bits_on_any_instances(joined, span, dtype):
    """Also in float64, where no rounding to float32 hides the order of additions."""
    parts = joined.run(local_replicas, span, dtype)
    assert_same([replica for part in parts for replica in part], local_replicas(Instances.alone(), span, dtype))


def local_replicas_in_pieces(instances: Instances, span: int, piece_bytes: int) -> tuple[Seen, bool]:
    """The same with sums in pieces of so many bytes; and whether gloo was needed."""
    with mock.patch.object(span_sums, "PIECE_BYTES", piece_bytes):
        seen = local_replicas(instances, span, torch.float64)
    return seen, any(thread.read_text() == "gloo_tcp_loop\n" for thread in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.slow
def test_instances_of_one_host_share_statistics_in_memory_alone():
    crew = Crew(4, __name__)
    try:
        for count in (2, 3, 4):
            crew.join_hosts([count])
            for span, piece_bytes in ((2, 1 << 16), (4, 1 << 16), (4, 16)):
                parts = crew.run(local_replicas_in_pieces, span, piece_bytes)
                seen = [replica for part, _ in parts for replica in part]
                assert_same(seen, local_replicas(Instances.alone(), span, torch.float64))
                assert not any(gloo for _, gloo in parts)
    finally:
        crew.close()


# The engine


class TinyWorkload:
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))


def trained(instances: Instances, span: int, options: dict | None = None) -> Seen:
    """Five updates of 4 replicas, accumulation 2; a parameter that never has a gradient among them."""
    options = options or {}
    num_replicas = options.get("replicas", REPLICAS)
    model = network(span)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)) if not options.get("reduction") else None)
    optimiser = build_optimiser(OptimSection(name="adamw", lr=0.01), model, by_dimension(model))
    batch = BatchSection(micro=3, accumulation=2, replicas=num_replicas)
    local = deal(num_replicas, instances.count)[instances.index]
    waits = []
    engine = small_engine(
        model, TinyWorkload(), optimiser, batch, seed=5, clip_norm=1.0, instances=instances,
        reduction=options.get("reduction", "exact"), waited=waits.append,
    )  # fmt: skip
    losses = []
    for update in range(5):
        generator = torch.Generator().manual_seed(update)
        shape = (num_replicas, 2, 3)
        samples = {
            "x": torch.randn(*shape, 2, 4, 4, generator=generator),
            "y": torch.randn(*shape, 3, generator=generator),
        }
        engine.update(update, {name: rows[local.start : local.stop] for name, rows in samples.items()}, lr=0.01)
        losses.append([total for total, _ in engine.collect().parts["loss"]])
    assert (instances.count == 1) == (not waits)
    state = {name: tensor.numpy() for name, tensor in state_tensors(optimiser).items()}
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return [weights | state | {"losses": np.array(losses)}]


@pytest.mark.slow
@pytest.mark.parametrize("span", [2, 4])
def test_updates_have_the_same_bits_on_any_instances(joined, span):
    alone = trained(Instances.alone(), span)
    for part in joined.run(trained, span):
        assert_same(part, alone)


@pytest.mark.slow
def test_more_replicas_than_spans_and_instances(joined):
    options = {"replicas": 12 if joined.count == 3 else 8}
    alone = trained(Instances.alone(), 4, options)
    for part in joined.run(trained, 4, options):
        assert_same(part, alone)


def test_the_engine_takes_spans_of_any_number_of_replicas():
    (six,) = trained(Instances.alone(), 2, {"replicas": 6})
    assert np.isfinite(six["losses"]).all()
    assert six["losses"].shape == (5, 12)


@pytest.mark.slow
def test_fast_reduction_learns_the_same_within_rounding(crew):
    crew.join(4)
    options = {"reduction": "fast"}
    (alone,) = trained(Instances.alone(), 2, options)
    for ((part),) in crew.run(trained, 2, options):
        np.testing.assert_allclose(part["losses"], alone["losses"], rtol=1e-3)
    crew.join(2)
    with pytest.raises(AssertionError, match=r"2 replicas per instance needs engine\.reduction=exact"):
        crew.run(trained, 2, options)


def test_a_span_makes_statistics_those_of_the_larger_micro_batch():
    """Without dropout, 4 replicas of 3 with span 4 learn what 1 replica of 12 learns, but for rounding."""

    def weights(span: int, replicas: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        norm = SpanBatchNorm(5, span) if span > 1 else nn.BatchNorm1d(5)
        model = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 2)).double()
        optimiser = build_optimiser(OptimSection(name="momentum", lr=0.1), model, by_dimension(model))
        batch = BatchSection(micro=12 // replicas, replicas=replicas)
        engine = small_engine(model, TinyWorkload(), optimiser, batch, seed=1)
        for update in range(4):
            generator = torch.Generator().manual_seed(update)
            rows = [torch.randn(12, size, generator=generator, dtype=torch.float64) for size in (4, 2)]
            x, y = (part.view(replicas, 1, 12 // replicas, -1) for part in rows)
            engine.update(update, {"x": x, "y": y}, lr=0.1)
        return model.state_dict()

    one, four = weights(1, 1), weights(4, 4)
    for name, tensor in one.items():
        torch.testing.assert_close(four[name], tensor, rtol=1e-11, atol=1e-11)


def test_the_engine_refuses_spans_that_do_not_fit():
    with pytest.raises(UserError, match=r"does not divide batch\.replicas = 3"):
        trained(Instances.alone(), 2, {"replicas": 3})


# Replicas side by side


def test_replicas_differ_but_share_running_statistics():
    pairs, fours = (local_replicas(Instances.alone(), span) for span in (2, 4))
    for name in ("2.running_mean", "2.running_var"):
        assert (fours[0][name] == fours[3][name]).all()
        assert (pairs[0][name] == pairs[1][name]).all()
        assert (pairs[0][name] != pairs[2][name]).any()
    assert (fours[0]["7.running_var"] != fours[2]["7.running_var"]).any(), "this layer spans 2 of the 4"
    assert fours[0]["2.num_batches_tracked"] == 2
    assert (fours[0]["output 0"] != fours[1]["output 0"]).any()


def test_each_replica_draws_what_it_would_draw_alone():
    def task(replica: int, exchange: bool) -> list[float]:
        torch.manual_seed(replica)
        drawn = []
        for _ in range(3):
            drawn += torch.rand(2).tolist()
            if exchange:
                exchanged(1.0)
        return drawn

    together = run_in_lockstep([lambda r=r: task(r, True) for r in range(4)])
    assert together == [task(r, False) for r in range(4)]


def test_exchange_sums_over_aligned_blocks_in_tree_order():
    values = [1e8, 1.0, -1e8, 1.0]  # (1e8 + 1) + (-1e8 + 1) is 0 in float32, from left to right it is 1
    for num_replicas, sums in {1: values, 2: [1e8, 1e8, -1e8, -1e8], 4: [0.0] * 4}.items():
        tasks = [lambda v=v, n=num_replicas: exchanged(v, n) for v in values]
        assert run_in_lockstep(tasks) == sums


def test_a_larger_span_is_completed_between_instances():
    def multiplied(tensor, num_replicas):
        return tensor * num_replicas

    assert run_in_lockstep([lambda: exchanged(1.0, 8), lambda: exchanged(2.0, 8)], multiplied) == [24.0, 24.0]
    assert run_in_lockstep([lambda: exchanged(1.0, 4)], multiplied) == [4.0]


def test_exactly_one_runs_at_a_time_in_order_of_the_replicas():
    ran = []

    def task(replica: int) -> None:
        for part in range(3):
            ran.append((part, replica))
            exchanged(0.0)

    run_in_lockstep([lambda r=r: task(r) for r in range(4)])
    assert ran == [(part, replica) for part in range(3) for replica in range(4)]


def test_backward_runs_in_the_thread_of_its_replica():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(threading.get_ident())
            exchanged(1.0)
            return dy

    def task() -> int:
        Watch.apply(torch.ones(2, requires_grad=True)).sum().backward()
        return threading.get_ident()

    idents = run_in_lockstep([task, task])
    assert seen == idents
    assert len(set(idents)) == 2
    assert idents[-1] == threading.get_ident(), "the last replica runs in the calling thread"


def test_threads_compute_with_the_callers_number_of_threads():
    torch.set_num_threads(3)
    try:
        assert run_in_lockstep([torch.get_num_threads] * 4) == [3] * 4
    finally:
        torch.set_num_threads(1)


def test_the_last_replica_finishes_a_gradient_last():
    """What lets the engine send a gradient as soon as the last local replica has it."""
    model = nn.Sequential(nn.Linear(3, 4), SpanBatchNorm(4, 4), nn.Linear(4, 2), SpanBatchNorm(2, 4))
    twins = [twin(model) for _ in range(3)]
    complete = []

    def check(name: str) -> None:
        complete.append(all(t.get_parameter(name).grad is not None for t in twins))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: check(name))
    run_in_lockstep([lambda m=m: m(torch.randn(3, 3)).square().sum().backward() for m in [*twins, model]])
    assert complete == [True] * 8


class Broken(Exception):
    pass


def broken_here() -> None:
    raise Broken("on purpose")


@pytest.mark.parametrize("where", ["at once", "between exchanges", "in backward"])
@pytest.mark.parametrize("which", range(4))
def test_an_error_surfaces_with_its_traceback_and_ends_the_others(which, where):
    ended = []

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, replica):
            ctx.replica = replica
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            exchanged(0.0)
            if ctx.replica == which:
                broken_here()
            exchanged(0.0)
            return dy, None

    def task(replica: int) -> None:
        try:
            if where == "at once" and replica == which:
                broken_here()
            exchanged(0.0)
            if where == "between exchanges" and replica == which:
                broken_here()
            exchanged(0.0)
            Fail.apply(torch.ones(1, requires_grad=True), replica).backward()
        finally:
            ended.append(replica)

    before = threading.active_count()
    with Lockstep(4) as lockstep:
        for _ in range(2):  # the threads are as good as new afterwards
            with pytest.raises(Broken, match="on purpose") as caught:
                lockstep.run([lambda r=r: task(r) for r in range(4)])
            assert "broken_here" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert lockstep.run([lambda: exchanged(1.0)] * 4) == [2.0] * 4
    assert threading.active_count() == before
    assert len(ended) == (2 * (which + 1) if where == "at once" else 8)


def test_an_error_between_instances_surfaces():
    def lost(tensor, num_instances):
        raise Broken("nobody answers")

    with pytest.raises(Broken, match="nobody answers"):
        run_in_lockstep([lambda: exchanged(1.0, 4)] * 2, lost)


@pytest.mark.parametrize("odd_one", [0, 1, 3])
def test_replicas_that_part_ways_are_an_error_not_a_hang(odd_one):
    def task(replica: int) -> None:
        exchanged(0.0)
        if replica != odd_one:
            exchanged(0.0)

    with pytest.raises(AssertionError, match="diverge"):
        run_in_lockstep([lambda r=r: task(r) for r in range(4)])


def test_nothing_is_held_after_the_run():
    """Graphs know their place in the lockstep; it must not know them, or neither would ever be freed."""
    model = nn.Sequential(nn.Linear(2, 2), SpanBatchNorm(2, 2))
    with Lockstep(2) as lockstep:
        losses = lockstep.run([lambda m=m: m(torch.randn(3, 2)).sum() for m in (twin(model), model)])
        gone = [weakref.ref(loss) for loss in losses]
        gc.disable()
        try:
            del losses
            assert [ref() for ref in gone] == [None, None]
        finally:
            gc.enable()


def test_threads_end_with_their_owner():
    before = threading.active_count()
    lockstep = Lockstep(4)
    lockstep.run([lambda: None] * 4)
    del lockstep
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("replica"):
            thread.join(10)
    assert threading.active_count() == before
