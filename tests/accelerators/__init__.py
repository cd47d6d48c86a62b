"""What holds on accelerators, as far as a machine without one can tell."""
