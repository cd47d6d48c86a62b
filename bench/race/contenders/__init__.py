"""The contenders, by name. A further one is one small file with `race(heat: Heat) -> Outcome`, and one line here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """How it is called in the table, where its `race` is, and whose version to tell."""

    title: str
    module: str
    package: str


_HERE = "bench.race.contenders"
PODIUM, PLAIN = "podium", "pytorch"
#: only where the library has the model
TRANSFORMERS = "transformers"
CONTENDERS = {
    PODIUM: Contender("Podium", f"{_HERE}.podium_train", "podium"),
    PLAIN: Contender("PyTorch loop", f"{_HERE}.pytorch_loop", "torch"),
    "pytorch-workers": Contender("PyTorch loop, 2 loader workers", f"{_HERE}.pytorch_loop_workers", "torch"),
    "lightning": Contender("Lightning", f"{_HERE}.lightning_trainer", "lightning"),
    "accelerate": Contender("Accelerate", f"{_HERE}.accelerate_loop", "accelerate"),
    TRANSFORMERS: Contender("Hugging Face Trainer", f"{_HERE}.hugging_face_trainer", "transformers"),
}
