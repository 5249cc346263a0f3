"""Saves, loads, verifies and deletes checkpoints."""
