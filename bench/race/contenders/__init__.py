"""The contenders, by name. To add one, write a small file with `race(heat: Heat) -> Outcome` and add a line here."""

import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.race.lane import Lane


@dataclass(frozen=True)
class Contender:
    """A contender's name in the table, the module of its `race`, and the package whose version is shown."""

    title: str
    module: str
    package: str
    #: set for its process
    environment: dict[str, str] = field(default_factory=dict)
    #: of the environment that has the package; None: this one
    python: Path | None = None

    @property
    def version(self) -> str:
        """Return the version of its package; empty if it is not installed."""
        paths = (
            [str(path) for path in self.python.parents[1].glob("lib/python*/site-packages")]
            if self.python
            else sys.path
        )
        found = next(iter(metadata.distributions(name=self.package, path=paths)), None)
        return found.version if found else ""


_HERE = "bench.race.contenders"
PODIUM, PLAIN = "podium", "pytorch"
#: only if the library has the model
TRANSFORMERS = ("transformers", "transformers-compiled")
#: only where a micro-batch may be divided: the statistics of a batch norm would be others
DIVIDED = "podium-2x1"
#: of Podium against itself: no rival of it
OWN = (PODIUM, DIVIDED)
#: only where the lane's model is written in Flax
JAX = "jax"
_VENV = Path(__file__).parents[3] / ".venv"
#: an environment of its own
JAX_PYTHON = _VENV / "jax" / "bin" / "python"
#: compiled code lives here from heat to heat and from race to race, so that each contender compiles a lane once
COMPILED = _VENV / "compiled"
JEMALLOC = _VENV / "jemalloc" / "libjemalloc.so.2"
#: as PyTorch's tuning guide has them
_GUIDE = {"MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,"
          "muzzy_decay_ms:-1"} | ({"LD_PRELOAD": str(JEMALLOC)} if JEMALLOC.exists() else {})  # fmt: skip
_ALLOCATOR = "jemalloc" if JEMALLOC.exists() else "glibc's allocator"
CONTENDERS = {
    PODIUM: Contender("Podium", f"{_HERE}.podium_train", "podium"),
    PLAIN: Contender("PyTorch loop", f"{_HERE}.pytorch_loop", "torch"),
    "pytorch-workers": Contender("PyTorch loop, 2 loader workers", f"{_HERE}.pytorch_loop_workers", "torch"),
    "pytorch-tuned": Contender(f"PyTorch by its tuning guide, {_ALLOCATOR}", f"{_HERE}.pytorch_tuned", "torch", _GUIDE),
    "pytorch-tuned-compiled": Contender(
        f"PyTorch by its tuning guide, torch.compile, {_ALLOCATOR}", f"{_HERE}.pytorch_tuned_compiled", "torch", _GUIDE
    ),
    "lightning": Contender("Lightning", f"{_HERE}.lightning_trainer", "lightning"),
    "lightning-compiled": Contender("Lightning, torch.compile", f"{_HERE}.lightning_compiled", "lightning"),
    "accelerate": Contender("Accelerate", f"{_HERE}.accelerate_loop", "accelerate"),
    "transformers": Contender("Hugging Face Trainer", f"{_HERE}.hugging_face_trainer", "transformers"),
    "transformers-compiled": Contender(
        "Hugging Face Trainer, torch.compile", f"{_HERE}.hugging_face_compiled", "transformers"
    ),
    JAX: Contender("JAX + Flax", f"{_HERE}.jax_flax", "jax", python=JAX_PYTHON),
    DIVIDED: Contender("Podium, 2 instances × 1 thread", f"{_HERE}.podium_instances", "podium"),
}


def entered(lane: "Lane", contenders: list[str]) -> list[str]:
    """Return those of the contenders that can train this lane."""
    left_out = set() if lane.for_transformers else set(TRANSFORMERS)
    left_out |= set() if lane.may_be_divided else {DIVIDED}
    left_out |= set() if lane.flax_model else {JAX}
    return [name for name in contenders if name not in left_out]
