"""Sums over replicas: the exact tree, its buffers in shared memory, and torch's DistributedDataParallel."""
