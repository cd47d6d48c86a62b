"""Podium on two instances of one thread each: the same global batch as two replicas of half the micro-batch."""

from bench.race.contenders import podium_train
from bench.race.heat import Heat, Outcome


def race(heat: Heat) -> Outcome:
    half = heat.recipe().batch.micro_batch // 2
    divided = [f"batch.micro={half}", "batch.replicas=2", "engine.threads=1"]
    return podium_train.race(heat, divided, ["--instances", "2"])
