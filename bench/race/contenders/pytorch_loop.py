"""The loop of PyTorch's tutorials: DataLoader, mean loss, backward, step, zero_grad; all else at its defaults."""

from bench.race.heat import Heat, Outcome, Stopwatch


def race(heat: Heat, num_workers: int = 0) -> Outcome:
    task, watch = heat.task(), Stopwatch(heat)
    model, optimiser = task.model, task.optimiser
    for batch in task.loader(num_workers):
        loss = task.mean_loss(model, *batch)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        watch.update_done()
    return Outcome(watch.seconds, model)
