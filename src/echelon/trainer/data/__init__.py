"""From data sets to batches: samplers, collators, loaders."""
