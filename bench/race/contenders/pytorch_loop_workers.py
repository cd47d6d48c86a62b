"""The same loop with `num_workers=2`: other processes gather the batches."""

from bench.race.contenders import pytorch_loop
from bench.race.heat import Heat, Outcome


def race(heat: Heat) -> Outcome:
    return pytorch_loop.race(heat, num_workers=2)
