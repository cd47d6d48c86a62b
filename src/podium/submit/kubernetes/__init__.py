"""Jobs of Kubernetes."""
