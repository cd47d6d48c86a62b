"""Podium: trains deep-learning models from one recipe, with the same weights on any number of processes."""

__version__ = "0.1.0"
