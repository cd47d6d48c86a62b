"""The parts of the training loop: building, feeding, evaluating, averaging, progress, stopping."""
