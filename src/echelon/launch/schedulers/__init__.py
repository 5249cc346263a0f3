"""Cluster schedulers: Slurm, Kubernetes, Ray."""
