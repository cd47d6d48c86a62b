"""Lightning with the model compiled."""

from bench.race.contenders import lightning_trainer
from bench.race.heat import Heat, Outcome


def race(heat: Heat) -> Outcome:
    return lightning_trainer.race(heat, compile=True)
