"""Saving, loading, verifying and deleting checkpoints."""
