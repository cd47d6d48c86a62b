"""Predicts hydrodynamic fields in a volume from N-body fields."""
