"""The simulators: cells per second of neuron's, alone and writing a data set; seconds and memory of cosmology's.

python bench/simulator.py [neuron [cells] | cosmology [size ...]]
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from podium.workloads.cosmology.simulator.simulate import make_box, needed_bytes
from podium.workloads.neuron.simulator.simulate import make_dataset, simulate, unit_parameters


def neuron(num_cells: int = 8192) -> None:
    unit = unit_parameters(1, "train", np.arange(2048))
    began = time.perf_counter()
    simulate(unit[:1])
    print(f"first call (compiles, or loads what was compiled): {time.perf_counter() - began:.1f} s")
    for threads in (1, None):
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            simulate(unit, threads)
            rates.append(len(unit) / (time.perf_counter() - began))
        print(f"integration, {'all cores' if threads is None else 'one thread'}: {max(rates):,.0f} cells/s")
    with tempfile.TemporaryDirectory() as folder:
        info = make_dataset(Path(folder), num_cells, valid=1, test=1)
        print(f"data set: {info.cells:,} cells in {info.seconds:.1f} s, {info.cells_per_second:,.0f} cells/s")


def cosmology(*sizes: int) -> None:
    # Each in a process of its own, since peak memory is measured per process.
    for size in sizes or (64, 128):
        process = multiprocessing.get_context("spawn").Process(target=_box, args=(size,))
        process.start()
        process.join()


def _box(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_box(Path(folder) / "warm.h5", 16, seed=1)  # compiles, or loads the compiled code
        before = _peak_mb()
        made = make_box(Path(folder) / "box.h5", size, seed=1)
    peak = _peak_mb()
    print(
        f"box of {size}³: {made.seconds:.1f} s, {made.cells_per_second:,.0f} cells/s; peak {peak:,.0f} MB, "
        f"{peak - before:,.0f} MB of it for the box ({needed_bytes(size) / 1e6:,.0f} MB asked for beforehand)"
    )


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def main(which: str = "", *numbers: str) -> None:
    if which in ("", "neuron"):
        neuron(*map(int, numbers[:1]))
    if which in ("", "cosmology"):
        cosmology(*map(int, numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
