"""Runs an update: its micro-steps and their weights, the optimizer step and the scheduler step."""
