"""Hugging Face's Trainer with `torch_compile`."""

from bench.race.contenders import hugging_face_trainer
from bench.race.heat import Heat, Outcome


def race(heat: Heat) -> Outcome:
    return hugging_face_trainer.race(heat, compile=True)
