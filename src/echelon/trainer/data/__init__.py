"""The Trainer's samplers, collators and data loaders."""
