"""Faster operators for modules and functions of plain torch; without one of them, torch does its work."""
