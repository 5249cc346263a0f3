"""Unwraps models, computes their sizes, and reads and writes their weight files."""
