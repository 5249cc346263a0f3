"""Saving and resuming from checkpoint-N directories."""
