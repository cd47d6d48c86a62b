"""The run folder: what a training writes into it, metrics, and the report."""
