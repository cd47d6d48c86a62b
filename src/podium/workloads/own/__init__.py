"""Workloads of users: their code found by name, defaults for what they leave out, models and data given to `fit`."""
