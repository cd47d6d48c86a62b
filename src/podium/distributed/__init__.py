"""Communication between instances: exact sums, shared memory, pipelines, sharding, and lost instances."""
