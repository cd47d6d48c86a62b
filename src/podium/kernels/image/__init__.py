"""Images as bytes, mirrored and normalised in one pass."""
