"""Predicts the parameters of a neuron's cell from its voltages."""
