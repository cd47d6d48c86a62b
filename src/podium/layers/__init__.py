"""Layers and losses that models share: plain modules for a single device."""
