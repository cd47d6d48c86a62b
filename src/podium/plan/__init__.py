"""Predicts time, throughput and memory of a training as intervals, and grades what it predicted."""
