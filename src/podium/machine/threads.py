"""Threads of torch's operators: those of the training itself, and none for what runs beside it (the feed, saving, the
carriers of gradients)."""

import torch


def use_threads(count: int) -> None:
    """Have the operators that this thread calls use `count` threads, whatever other threads ask for later.

    torch keeps the last number that any thread has set, and a thread takes it over in its first parallel operator.
    Unless that has happened before the feed starts, the training would go on with the feed's single thread, or not,
    by what was computed before: asking for the number settles it.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def stay_single() -> None:
    """Called first by a thread that runs beside the training: its torch operators use no further threads.

    GNU's OpenMP keeps a team of workers for every thread that has used one. With more workers than cores, idle ones
    included, it lets all of them sleep between operators, and the training's small operators wait for each to wake:
    half the speed of mnist at micro-batch 8 from the first checkpoint on (bench/results/defaults.md).
    """
    torch.set_num_threads(1)  # OpenMP counts per thread that calls it: nobody else's number changes
