"""Random draws of datasets, loaders and their workers."""
