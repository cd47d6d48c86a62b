"""The side of the contender JAX + Flax that runs in its own environment: the models and the loop."""
