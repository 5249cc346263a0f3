"""Gradient sums and norms that are bit-identical on any number of ranks."""
