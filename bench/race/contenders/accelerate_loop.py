"""Hugging Face Accelerate: the plain loop with everything prepared by an `Accelerator`, as its tutorials write it."""

import accelerate

from bench.race.heat import Heat, Outcome, Stopwatch


def race(heat: Heat) -> Outcome:
    task, watch = heat.task(), Stopwatch(heat)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimiser, loader = accelerator.prepare(task.model, task.optimiser, task.loader())
    for batch in loader:
        optimiser.zero_grad()
        loss = task.mean_loss(model, *batch)
        accelerator.backward(loss)
        optimiser.step()
        watch.update_done()
    return Outcome(watch.seconds, accelerator.unwrap_model(model))
