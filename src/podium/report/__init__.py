"""Runs beside each other: what is read of their folders, time to a target, scaling, differences, the HTML page."""
