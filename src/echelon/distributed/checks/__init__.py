"""Checks that detect silent mistakes in training loops and name their line."""
