"""The simulator of boxes of dark matter and gas."""
