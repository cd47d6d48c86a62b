"""Optimisers, learning-rate schedules, and the state they keep."""
