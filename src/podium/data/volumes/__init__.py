"""Random crops of large periodic boxes, rotated and reflected."""
