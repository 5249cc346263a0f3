"""Models: unwrapping, sizes, and weights in files."""
