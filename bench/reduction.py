"""The exact reduction against the fast one (torch's DistributedDataParallel): samples per second of the whole engine.

    python -m bench.reduction [--quick]

Every instance holds both contenders, each with its own model and optimiser, and they alternate round by round, so that
other load on the machine affects both alike. One replica per instance, one thread each, over loopback. Prints a table
and writes bench/results/reduction.md.
"""

import argparse
import datetime
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.contract import Loss, Workload, by_dimension
from podium.data.source import Source
from podium.distributed.instances import Instances
from podium.engine.parallelism import Replicated
from podium.engine.state import Lengths, Task, TrainState
from podium.engine.update import Engine, Events, UpdateOptions
from podium.optim.optimisers import build_optimiser
from podium.optim.schedules import build_schedule
from podium.recipe.loading import load_recipe
from podium.recipe.sections.batch import BatchSection
from podium.recipe.sections.optim import OptimSection
from podium.recipe.sections.schedule import ScheduleSection
from podium.workloads.registry import workload_class

Reduction = Literal["exact", "fast"]
CONTENDERS: tuple[Reduction, ...] = ("exact", "fast")
RESULTS = Path(__file__).parent / "results" / "reduction.md"


@dataclass(frozen=True)
class Lane:
    """What is trained, and how many updates make a round."""

    name: str
    recipe: tuple[str, ...]
    micro_batch: int
    updates: int


LANES = (
    Lane("neuron full", ("neuron/full", "workload.data.source=generated"), 48, 6),
    Lane("mnist", ("mnist", "workload.data.source=generated"), 64, 20),
    Lane("100 MB", (), 32, 2),
)


class Wide:
    """A model with 25 million weights, 100 MB of gradients, in six layers: little to compute, much to send."""

    def build_model(self) -> nn.Module:
        layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        return Loss(model(batch["input"]).square().sum(), len(batch["input"]))

    def example(self, num_samples: int) -> dict[str, Tensor]:
        return {"input": torch.randn(num_samples, 2048)}


@dataclass
class Round:
    seconds: float
    #: of this instance's processor time
    cpu_s: float
    waited_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 instances, few rounds; writes nothing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lane", action="append", choices=[lane.name for lane in LANES])
    options = parser.parse_args()
    counts, num_rounds = ((2,), 3) if options.quick else ((2, 4), options.rounds)
    lines = [
        "| lane | micro-batch | instances | exact samples/s | fast samples/s | exact / fast (spread) | "
        "CPU ms per update, exact / fast | waiting ms, exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for lane in LANES:
        if options.lane and lane.name not in options.lane:
            continue
        for count in counts:
            lines.append(_row(lane, count, _measured(lane, count, num_rounds)))
            print(lines[-1], flush=True)
    if not options.quick and not options.lane:
        _write(lines, num_rounds)


def _row(lane: Lane, count: int, rounds: dict[Reduction, list[list[Round]]]) -> str:
    """Format a row of the table; `rounds` are by contender, then round, then instance."""
    samples = lane.micro_batch * lane.updates * count
    seconds = {name: [max(one.seconds for one in each) for each in rounds[name]] for name in CONTENDERS}
    cpu_ms = {
        name: statistics.median(sum(one.cpu_s for one in each) for each in rounds[name]) / lane.updates * 1e3
        for name in CONTENDERS
    }
    waiting_ms = statistics.median(one.waited_s for each in rounds["exact"] for one in each) / lane.updates * 1e3
    # Neighbouring rounds see the same load on the machine, so ratios are taken between them.
    ratios = sorted(fast / exact for exact, fast in zip(seconds["exact"], seconds["fast"], strict=True))
    rates = {name: samples / statistics.median(seconds[name]) for name in CONTENDERS}
    return (
        f"| {lane.name} | {lane.micro_batch} | {count} | {rates['exact']:,.0f} | {rates['fast']:,.0f} | "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}) | "
        f"{cpu_ms['exact']:.1f} / {cpu_ms['fast']:.1f} | {waiting_ms:.1f} |"
    )


def _measured(lane: Lane, count: int, num_rounds: int) -> dict[Reduction, list[list[Round]]]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    for index in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_instance, args=(lane, index, count, port, num_rounds, theirs)))
        processes[-1].start()
        links.append(ours)
        theirs.close()
    answers = [link.recv() for link in links]
    for process in processes:
        process.join()
    del store
    return {
        name: [list(each) for each in zip(*(answer[name] for answer in answers), strict=True)] for name in CONTENDERS
    }


def _instance(
    lane: Lane, index: int, count: int, port: int, num_rounds: int, link: "multiprocessing.connection.Connection"
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    instances = Instances.join(dist.TCPStore("127.0.0.1", port, is_master=False), index, count, 300, [count])
    waits: list[float] = []
    engines = {name: _engine(lane, instances, name, waits) for name in CONTENDERS}
    batch = {name: rows[None, None] for name, rows in _workload(lane).example(lane.micro_batch).items()}
    rounds: dict[Reduction, list[Round]] = {name: [] for name in CONTENDERS}
    for number in range(-1, num_rounds):  # the first one warms up
        order = CONTENDERS if number % 2 else CONTENDERS[::-1]
        for name in order:
            waits.clear()
            instances.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for update in range(lane.updates):
                engines[name].update(update, batch, 1e-6)
            done = Round(time.perf_counter() - began, time.process_time() - cpu_began, sum(waits))
            engines[name].collect()
            if number >= 0:
                rounds[name].append(done)
    instances.barrier()
    link.send(rounds)
    instances.close()


def _workload(lane: Lane) -> Workload:
    if not lane.recipe:
        return cast(Workload, Wide())
    section = load_recipe(lane.recipe[0], list(lane.recipe[1:])).workload
    return cast(Workload, workload_class(section.name)(section.model, section.data))


def _engine(lane: Lane, instances: Instances, reduction: Reduction, waits: list[float]) -> Engine:
    workload = _workload(lane)
    torch.manual_seed(0)
    model = workload.build_model().train()
    optim = (
        load_recipe(lane.recipe[0], list(lane.recipe[1:])).optim if lane.recipe else OptimSection(name="sgd", lr=0.1)
    )
    batch = BatchSection(micro=lane.micro_batch, replicas=instances.count)
    no_samples = cast(Source, None)
    return Engine(
        Task(workload, no_samples, no_samples, Lengths(1, 1, batch.global_batch)),
        TrainState(
            model,
            build_optimiser(optim, model, by_dimension(model)),
            build_schedule(ScheduleSection(), 0.1, 1, 1, batch.global_batch),
        ),
        Replicated(model, instances, reduction),
        UpdateOptions(batch, seed=1),
        Events(waits.append),
    )


def _write(lines: list[str], num_rounds: int) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    load = os.getloadavg()[0]
    about = (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, "
        f"1 thread per instance, medians of {num_rounds} rounds in turn, load average at the end {load:.1f}. "
        "CPU time is that of all instances together. Written by `python -m bench.reduction`."
    )
    RESULTS.write_text("\n".join(["# Exact against fast reduction", "", about, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
