"""Optimiser state and parameters divided between instances, and gathered for checkpoints."""
