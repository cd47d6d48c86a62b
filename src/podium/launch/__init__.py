"""Starts the instances of a training on one host or several, watches them, and restarts them."""
