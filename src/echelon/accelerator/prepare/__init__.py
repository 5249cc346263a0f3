"""``prepare``: models, optimizers, schedulers and loaders."""
