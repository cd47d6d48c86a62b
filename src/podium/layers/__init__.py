"""Layers that models share; plain single-device modules."""
