"""One weight update: forward and backward passes over the replicas of this instance, reduction, optimiser step."""
