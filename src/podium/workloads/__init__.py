"""The shipped workloads, each in a folder of its own, found by name."""
