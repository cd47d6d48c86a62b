"""The contenders, by name. To add one, write a small file with `race(heat: Heat) -> Outcome` and add a line here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """A contender's name in the table, the module of its `race`, and the package whose version is shown."""

    title: str
    module: str
    package: str


_HERE = "bench.race.contenders"
PODIUM, PLAIN = "podium", "pytorch"
#: only if the library has the model
TRANSFORMERS = "transformers"
CONTENDERS = {
    PODIUM: Contender("Podium", f"{_HERE}.podium_train", "podium"),
    PLAIN: Contender("PyTorch loop", f"{_HERE}.pytorch_loop", "torch"),
    "pytorch-workers": Contender("PyTorch loop, 2 loader workers", f"{_HERE}.pytorch_loop_workers", "torch"),
    "lightning": Contender("Lightning", f"{_HERE}.lightning_trainer", "lightning"),
    "accelerate": Contender("Accelerate", f"{_HERE}.accelerate_loop", "accelerate"),
    TRANSFORMERS: Contender("Hugging Face Trainer", f"{_HERE}.hugging_face_trainer", "transformers"),
}
