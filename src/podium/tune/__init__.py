"""Measures settings on this machine and remembers the fastest: `podium tune`, and how training uses it."""
