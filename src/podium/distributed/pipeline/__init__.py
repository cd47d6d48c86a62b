"""Pipelines, one replica over several devices: where the model is cut, in which order its parts run, the runtime."""
