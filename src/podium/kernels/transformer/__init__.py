"""Operators of transformers: attention with dropout, GELU, cross-entropy, large vocabularies."""
