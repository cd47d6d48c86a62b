"""Sums of 100 MB over instances whose blocks of replicas are alike, and over others: seconds, and what hosts send.

    python -m bench.blocks [--quick]

Eight replicas on instances of one host, which share memory, and of several, which exchange messages over loopback. All
places are measured in turn, round by round, so that other load on the machine affects them alike. The sums are those of
a training (`summed_buffers`), in buckets and two lanes, without the passes. Where a number of instances cannot have
blocks that are alike, its time is compared with what lies between its neighbours that can, by the instances that the
busiest core carries (on two cores: 3 with 4). So is the processor time of all instances together, which other load on
the machine changes little. Prints a table and writes bench/results/blocks.md.
"""

import argparse
import datetime
import os
import platform
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from podium.distributed.instances import Instances
from podium.distributed.reduction.exact import BUCKET_BYTES
from podium.distributed.reduction.exchange import Exchange
from podium.distributed.reduction.summed_buffers import LANES, summed_buffers
from podium.machine.allocator import keep_memory
from podium.topology import share_of_cores, usable_cores

NUM_REPLICAS, NUM_BYTES = 8, 100 << 20
#: seconds of a sum until the last instance has it, and of the processors for all instances
Seconds = tuple[float, float]
#: (the instances on each host, places that are alike and have as many instances, or between them)
PLACES: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
    ((2,), ()), ((4,), ()), ((8,), ()), ((3,), ((2,), (4,))), ((5,), ((4,), (8,))), ((6,), ((4,), (8,))),
    ((7,), ((4,), (8,))), ((1, 1), ()), ((2, 2), ()), ((1,) * 4, ()), ((1, 3), ((2, 2),)),
    ((1,) * 3, ((1,) * 2, (1,) * 4)),
]  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "blocks.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and instances; writes nothing")
    options = parser.parse_args()
    places = [place for place in PLACES if not options.quick or sum(place[0]) <= 4]
    num_rounds = 2 if options.quick else 5
    seconds = _measured([sizes for sizes, _ in places], num_rounds)
    lines = [
        "| instances on each host | replicas of each | subtrees | ms for 100 MB | compared with even blocks | "
        "ms of all processors | compared with even blocks | MB that the busiest host sends |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sizes, alike in places:
        exchange = Exchange(NUM_REPLICAS, sizes)
        blocks = [sum(map(len, parts)) for parts in exchange.subtrees]
        took, used = (_median(seconds[sizes], part) for part in (0, 1))
        ratio = f"{took / _between(sizes, alike, seconds, 0):.2f}" if alike else ""
        used_ratio = f"{used / _between(sizes, alike, seconds, 1):.2f}" if alike else ""
        lines.append(
            f"| {', '.join(map(str, sizes))} | {', '.join(map(str, blocks))} | "
            f"{', '.join(str(len(parts)) for parts in exchange.subtrees)} | {1e3 * took:.0f} | {ratio} | "
            f"{1e3 * used:.0f} | {used_ratio} | {_sent(exchange) * NUM_BYTES / 1e6:.0f} |"
        )
    print("\n".join(lines))
    if not options.quick:
        _write(lines, num_rounds)


def _sent(exchange: Exchange) -> float:
    hosts = len(exchange.hosts)
    return 0.0 if hosts == 1 else 2 * (1 - 1 / hosts) if exchange.is_even else exchange.busiest


def _between(
    sizes: tuple[int, ...],
    alike: tuple[tuple[int, ...], ...],
    seconds: dict[tuple[int, ...], list[Seconds]],
    part: int,
) -> float:
    """Return what instances with blocks that are alike would take, on a line between the two that there are."""
    first, last = alike[0], alike[-1]
    low, high = (_median(seconds[place], part) for place in (first, last))
    if first == last:
        return low
    here, below, above = (-(-sum(place) // (os.cpu_count() or 1)) for place in (sizes, first, last))
    return low + (high - low) * (here - below) / max(1, above - below)


def _median(seconds: list[Seconds], part: int) -> float:
    return statistics.median(one[part] for one in seconds)


def _measured(places: list[tuple[int, ...]], num_rounds: int) -> dict[tuple[int, ...], list[Seconds]]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    context = torch.multiprocessing.get_context("spawn")
    found: dict[tuple[int, ...], list[Seconds]] = {sizes: [] for sizes in places}
    links: list[Any] = []
    for index in range(max(map(sum, places))):
        ours, theirs = context.Pipe()
        context.Process(target=_instance, args=(index, port, theirs), daemon=True).start()
        links.append(ours)
    for number in range(num_rounds):
        for sizes in places:
            used = links[: sum(sizes)]
            for link in used:
                link.send((f"{number}-{sizes}", sizes))
            answers = [link.recv() for link in used]
            found[sizes].append((max(took for took, _ in answers), sum(used for _, used in answers)))
    for link in links:
        link.send(None)
    del store
    return found


def _instance(index: int, port: int, link: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_memory()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    cores = usable_cores()
    while (call := link.recv()) is not None:
        name, sizes = call
        os.sched_setaffinity(0, share_of_cores(cores, index, sum(sizes)))  # as a launcher does
        instances = Instances.join(dist.PrefixStore(name, store), index, sum(sizes), 100, sizes)
        link.send(_seconds(instances))
        instances.close()


def _seconds(instances: Instances) -> Seconds:
    """Return the seconds of a sum, and of this instance's processor time in it: each the better of two, after one that
    warms up."""
    num_buckets = NUM_BYTES // BUCKET_BYTES
    buckets = [(BUCKET_BYTES // 4, torch.float32)] * num_buckets
    summed = summed_buffers(instances, NUM_REPLICAS, buckets, torch.device("cpu"))
    for flats in (*(one.flats for one in summed.sets), *summed.complete):
        for flat in flats:
            flat.fill_(0.125)

    def sum_lane(lane: int) -> None:
        for number in range(lane, num_buckets, LANES):
            summed.sum(number, lane)

    took = []
    for _ in range(3):
        instances.barrier()
        began, used = time.perf_counter(), time.process_time()
        lanes = [threading.Thread(target=sum_lane, args=(lane,)) for lane in range(LANES)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        instances.barrier()
        took.append((time.perf_counter() - began, time.process_time() - used))
    return min(took for took, _ in took[1:]), min(used for _, used in took[1:])


def _write(lines: list[str], num_rounds: int) -> None:
    about = (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, "
        f"1 thread per instance, medians of {num_rounds} rounds in turn, load average at the end "
        f"{os.getloadavg()[0]:.1f}. Written by `python -m bench.blocks`."
    )
    RESULTS.write_text("\n".join(["# Even and uneven blocks of replicas", "", about, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
