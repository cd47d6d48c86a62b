"""The arithmetic of a lane: FLOPs of a sample, and the most this machine computes in a second.

python -m bench.race.machine        prints the peak of float32 matrix products in GFLOP/s
"""

import subprocess
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.race.lane import Lane, build_model, build_workload
from podium.recipe.loading import Recipe

_SIZE = 2048
_NUM_TIMES = 20


def flops_per_sample(lane: Lane, recipe: Recipe) -> float:
    """Count the FLOPs of forward and backward, two per multiply-add, in matrix products and convolutions only."""
    workload = build_workload(recipe)
    model = build_model(recipe, workload)
    example = {name: rows.numpy() for name, rows in workload.example(2).items()}
    batch = {name: torch.from_numpy(rows) for name, rows in lane.as_tensors(recipe, example).items()}
    # The CPU's own attention kernel would not be counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        lane.mean_loss(model, **batch).backward()
    return counter.get_total_flops() / 2


def sgemm_peak() -> float:
    """Measure the FLOP/s of the best of several products of 2048 × 2048 matrices on all cores, in a fresh process."""
    done = subprocess.run([sys.executable, "-m", "bench.race.machine"], capture_output=True, text=True, check=True)
    return float(done.stdout) * 1e9


def main() -> None:
    a, b, out = (torch.rand(_SIZE, _SIZE) for _ in range(3))
    seconds = []
    for _ in range(_NUM_TIMES):
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - began)
    print(2 * _SIZE**3 / min(seconds) / 1e9)


if __name__ == "__main__":
    main()
