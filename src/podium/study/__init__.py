"""A family of runs: what to try, in which order, side by side, and what came out."""
