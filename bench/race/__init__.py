"""Podium against the loops and libraries that others use; `__main__.py` explains what is compared and how.

lane.py         what a lane is: one training, the same for all; the lanes themselves are in lanes/
heat.py         what a contender is given and returns; the contenders themselves are in contenders/
process.py      runs every heat in a process of its own
machine.py      FLOPs of a sample, and the machine's peak
page.py         the table
"""
