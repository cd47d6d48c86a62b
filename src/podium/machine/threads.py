"""Threads beside the training (the feed, saving, the carriers of gradients): they leave OpenMP to it."""

import torch


def stay_single() -> None:
    """Called first by a thread that runs beside the training: its torch operators use no further threads.

    GNU's OpenMP keeps a team of workers for every thread that has used one. With more workers than cores, idle ones
    included, it lets all of them sleep between operators, and the training's small operators wait for each to wake:
    half the speed of mnist at micro-batch 8 from the first checkpoint on (bench/results/defaults.md).
    """
    torch.set_num_threads(1)  # OpenMP counts per thread that calls it: nobody else's number changes
