"""How much memory `parallel.shard` saves on every instance, and how much time it costs.

    python -m bench.sharding [--quick]

A GPT-2 of 10 million weights with adamw, one replica and one thread per instance. Every contender runs in processes of
its own, since memory is compared; they alternate round by round, and ratios are taken within a round. Prints a table
and writes bench/results/sharding.md.

    state    bytes of optimiser state that an instance holds (the largest)
    USS      memory of its process that no other one shares, after the last update: Python, torch, data, weights,
             gradients and state. Gradients that instances of a host share are not in it
    above    the same minus what the process had before the model was built
    told     bytes of weights that an instance takes from others after a step (the most)
    busy     processor time of all instances together for an update, which other load on the machine changes little

`optimiser + 1`: with launch.spare_copies=1.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.engine.parallelism import ShardedOptimiser
from podium.recipe.loading import load_recipe
from podium.topology import build_topology
from podium.training.build import build_training
from podium.training.feeding import build_engine, samples_of_updates

RESULTS = Path(__file__).parent / "results" / "sharding.md"
MODEL = ["gpt2/quick", "workload.data.source=generated", "workload.data.samples=256", "workload.model.layers=4",
         "workload.model.hidden=384", "workload.model.heads=6", "workload.model.vocabulary=8192",
         "workload.model.context=32", "batch.micro=2", "engine.threads=1"]  # fmt: skip
#: reduction and shard; the others of a reduction are compared with its first
CONTENDERS = (
    ("exact", "none"),
    ("exact", "optimiser"),
    ("exact", "optimiser + 1"),
    ("fast", "none"),
    ("fast", "parameters"),
)
_MB = 1e6


@dataclass(frozen=True)
class Measured:
    """Measurements of one instance."""

    state_bytes: int
    uss: int
    above: int
    rss: int
    told: int
    seconds: float
    busy_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 instances, one round; writes nothing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--instance", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instance:
        index, count, port, reduction, shard = options.instance
        print(json.dumps(vars(_instance(int(index), int(count), int(port), reduction, shard))))
        return
    counts, num_rounds = ((1, 2), 1) if options.quick else ((1, 2, 4), options.rounds)
    lines = [
        "| instances | reduction | shard | state MB | USS MB | above MB | RSS MB | told MB | ms per update | "
        "time against none | busy ms | busy against none |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for count in counts:
        contenders = CONTENDERS if count > 1 else CONTENDERS[:1]
        rounds = [{contender: _round(count, *contender) for contender in contenders} for _ in range(num_rounds)]
        for contender in contenders:
            lines.append(_row(count, contender, rounds))
            print(lines[-1], flush=True)
    if not options.quick:
        _write(lines, num_rounds)


def _row(count: int, contender: tuple[str, str], rounds: list[dict[tuple[str, str], list[Measured]]]) -> str:
    def median(field: str) -> float:
        return statistics.median(max(getattr(one, field) for one in each[contender]) for each in rounds)

    def busy(each: dict[tuple[str, str], list[Measured]], which: tuple[str, str]) -> float:
        return sum(one.busy_s for one in each[which])

    base = (contender[0], "none")
    ratios = [max(o.seconds for o in each[contender]) / max(o.seconds for o in each[base]) for each in rounds]
    more = statistics.median(busy(each, contender) / busy(each, base) for each in rounds)
    memory = " | ".join(f"{median(field) / _MB:.0f}" for field in ("state_bytes", "uss", "above", "rss", "told"))
    return (
        f"| {count} | {contender[0]} | {contender[1]} | {memory} | {median('seconds') * 1e3:.0f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) | "
        f"{statistics.median(busy(each, contender) for each in rounds) * 1e3:.0f} | {more:.2f} |"
    )


def _round(count: int, reduction: str, shard: str) -> list[Measured]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    processes = []
    for index in range(count):
        place = [str(value) for value in (index, count, port, reduction, shard)]
        command = [sys.executable, "-m", "bench.sharding", "--instance", *place]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate()[0] for process in processes]
    del store
    return [Measured(**json.loads(answer.splitlines()[-1])) for answer in answers]


def _instance(index: int, count: int, port: int, reduction: str, shard: str, num_updates: int = 12) -> Measured:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    instances = Instances.join(dist.TCPStore("127.0.0.1", port, is_master=False), index, count, 300, [count])
    name, *overrides = MODEL
    shard, _, spares = shard.partition(" + ")
    keys = [f"batch.replicas={count}", f"engine.reduction={reduction}", f"parallel.shard={shard}"]
    keys += [f"launch.spare_copies={spares or 0}"]
    recipe = load_recipe(name, [*overrides, *keys])
    if shard == "parameters":
        for module in ("torch.distributed.fsdp", "torch._dynamo"):  # loaded with it: 110 MB in USS, not in above
            importlib.import_module(module)
    before = psutil.Process().memory_full_info().uss
    training = build_training(recipe, build_topology(count, count), instances, 1)
    engine = build_engine(training)
    seconds, busy = [], []
    with samples_of_updates(training, 0, num_updates) as all_samples:
        for update, samples in enumerate(all_samples):
            instances.barrier()
            began, before_s = time.perf_counter(), time.process_time()
            engine.update(update, samples, 1e-4)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - before_s)
    instances.barrier()
    memory = psutil.Process().memory_full_info()
    state = sum(tensor.nbytes for slots in training.state.optimiser.state.values() for tensor in slots.values())
    told, form = 0, training.parallelism
    if isinstance(form, ShardedOptimiser):
        params = training.state.model.named_parameters()
        told = sum(param.nbytes for name, param in params if name not in form.held())
    del engine, form, training  # before the groups they talk over
    instances.barrier()
    times = statistics.median(seconds[2:]), statistics.median(busy[2:])
    measured = Measured(state, memory.uss, memory.uss - before, memory.rss, told, *times)
    instances.close()
    return measured


def _write(lines: list[str], num_rounds: int) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    about = (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, gpt2 with "
        f"10.2 million weights (41 MB), adamw, 1 thread per instance, medians of {num_rounds} rounds in turn, load "
        f"average at the end {os.getloadavg()[0]:.1f}. `above`: USS less that of the process before the model was "
        "made. Where four instances share two cores, times say little. Written by `python -m bench.sharding`."
    )
    RESULTS.write_text("\n".join(["# Memory of shards", "", about, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
