"""A pod's recipe on one machine: what the pod would look like, and a small training with the same structure."""
