"""The same loop with `torch.compile`, which the first updates of the warm-up pay for."""

from bench.race.contenders import pytorch_tuned
from bench.race.heat import Heat, Outcome


def race(heat: Heat) -> Outcome:
    return pytorch_tuned.race(heat, compile=True)
