"""Checkpoints: written atomically with checksums, read back and verified; weights for Hugging Face's libraries."""
