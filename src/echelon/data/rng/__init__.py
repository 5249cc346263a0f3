"""Random number generation in datasets, loaders and their workers."""
