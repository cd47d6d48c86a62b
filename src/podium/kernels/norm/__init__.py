"""Batch norm by our own operator."""
