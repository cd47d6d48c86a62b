"""Everything between files and batches: sources of samples, the order they are trained in, and the feed."""
