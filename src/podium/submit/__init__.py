"""Hands trainings to Slurm, Kubernetes or hosts reached by ssh, and remembers what was submitted from here."""
