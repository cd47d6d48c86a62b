"""Measures choices on this machine and remembers them: `podium tune`, and what training makes of it."""
