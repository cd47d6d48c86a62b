"""The contenders, by name. To add one, write a small file with `race(heat: Heat) -> Outcome` and add a line here."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Contender:
    """A contender's name in the table, the module of its `race`, and the package whose version is shown."""

    title: str
    module: str
    package: str
    #: set for its process
    environment: dict[str, str] = field(default_factory=dict)


_HERE = "bench.race.contenders"
PODIUM, PLAIN = "podium", "pytorch"
#: only if the library has the model
TRANSFORMERS = ("transformers", "transformers-compiled")
#: only where a micro-batch may be divided: the statistics of a batch norm would be others
DIVIDED = "podium-2x1"
#: of Podium against itself: no rival of it
OWN = (PODIUM, DIVIDED)
JEMALLOC = Path(__file__).parents[3] / ".venv" / "jemalloc" / "libjemalloc.so.2"
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
        f"the same, torch.compile, {_ALLOCATOR}", f"{_HERE}.pytorch_tuned_compiled", "torch", _GUIDE
    ),
    "lightning": Contender("Lightning", f"{_HERE}.lightning_trainer", "lightning"),
    "lightning-compiled": Contender("Lightning, torch.compile", f"{_HERE}.lightning_compiled", "lightning"),
    "accelerate": Contender("Accelerate", f"{_HERE}.accelerate_loop", "accelerate"),
    "transformers": Contender("Hugging Face Trainer", f"{_HERE}.hugging_face_trainer", "transformers"),
    "transformers-compiled": Contender(
        "Hugging Face Trainer, torch.compile", f"{_HERE}.hugging_face_compiled", "transformers"
    ),
    DIVIDED: Contender("Podium, 2 instances × 1 thread", f"{_HERE}.podium_instances", "podium"),
}
