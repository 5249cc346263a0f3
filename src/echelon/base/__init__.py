"""Errors, logging, the environment, devices; imports nothing of echelon."""
