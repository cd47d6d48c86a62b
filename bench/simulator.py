"""Cells per second of the neuron simulator: integration alone, and writing a data set.

python bench/simulator.py [cells]
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from podium.workloads.neuron.simulate import make_dataset, simulate, unit_parameters


def main(num_cells: int = 8192) -> None:
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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
