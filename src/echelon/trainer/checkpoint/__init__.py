"""Saving and resuming checkpoint-N directories."""
