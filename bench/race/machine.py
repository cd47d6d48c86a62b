"""The work of a lane's update, counted, and the most this machine does in a second, measured: the two of a roofline.

python -m bench.race.machine        prints the peak of float32 products in FLOP/s, and of memory in bytes/s
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.race.lane import Lane, build_model, build_workload
from podium.machine.allocator import keep_memory
from podium.profiling.peaks import Peaks, measure_peaks
from podium.recipe.loading import Recipe

_EXAMPLE = 2
#: reads and writes of a tensor that no implementation can avoid if no cache holds it
_INPUT_PASSES = 3  # written by the layer before; read by this one and, later, by its weights' gradient
_OUTPUT_PASSES = 2  # its gradient: written, and read once for the gradients of weights and inputs
_WEIGHT_PASSES = 3  # read in both passes, written by the step, into which its gradient may go directly
_MOMENT_PASSES = 2


@dataclass(frozen=True)
class Work:
    """What one update needs at least."""

    samples: int
    flops: float
    bytes: float

    @property
    def flops_per_sample(self) -> float:
        return self.flops / self.samples

    def fastest(self, peaks: Peaks) -> float:
        """Return the samples/s that arithmetic and memory allow."""
        seconds = max(self.flops / peaks.flops_per_second, self.bytes / peaks.bytes_per_second)
        return self.samples / seconds

    def limited_by(self, peaks: Peaks) -> str:
        return "arithmetic" if self.flops / self.bytes >= peaks.ridge else "memory"


def count_work(lane: Lane, recipe: Recipe) -> Work:
    """Count one update: FLOPs of both passes, two per multiply-add, in products and convolutions only, and least bytes.

    Bytes are those that cross to memory and back even if all else is fused: inputs of products and convolutions and the
    gradients of their outputs, weights, and the optimiser's moments.
    """
    workload = build_workload(recipe)
    model = build_model(recipe, workload)
    example = {name: rows.numpy() for name, rows in workload.example(_EXAMPLE).items()}
    batch = {name: torch.from_numpy(rows) for name, rows in lane.as_tensors(recipe, example).items()}
    activations = _Activations()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            module.register_forward_hook(activations.note)
    # The CPU's own attention kernel would not be counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        lane.mean_loss(model, **batch).backward()
    samples = recipe.batch.global_batch
    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    passes = _WEIGHT_PASSES + _MOMENT_PASSES * _num_moments(lane, model)
    scale = samples / _EXAMPLE
    return Work(samples, counter.get_total_flops() * scale, activations.bytes * scale + weights * passes)


class _Activations:
    """Adds up what the layers that compute products read and write."""

    def __init__(self) -> None:
        self.bytes = 0

    def note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ins = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        self.bytes += _INPUT_PASSES * ins + _OUTPUT_PASSES * output.numel() * output.element_size()


def _num_moments(lane: Lane, model: nn.Module) -> int:
    """Return how many values the lane's optimiser keeps for each weight."""
    values = lane.optimiser(model.parameters()).defaults
    return 2 if "betas" in values else int(values.get("momentum", 0) > 0)


def measured_peaks() -> Peaks:
    """Measure the best of several products of 2048 × 2048 matrices, and of sums of arrays that no cache holds, on all
    cores, in a fresh process."""
    done = subprocess.run([sys.executable, "-m", "bench.race.machine"], capture_output=True, text=True, check=True)
    return Peaks(**json.loads(done.stdout))


def best_of(peaks: list[Peaks]) -> Peaks:
    """Return the best of what was measured between the lanes."""
    return Peaks(max(peak.flops_per_second for peak in peaks), max(peak.bytes_per_second for peak in peaks))


if __name__ == "__main__":
    keep_memory()  # as a training does
    print(json.dumps(asdict(measure_peaks(torch.device("cpu")))))
