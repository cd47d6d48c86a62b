"""Batch norm with sum and ReLU as one operator."""
