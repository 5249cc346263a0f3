"""``Accelerator.prepare`` for models, optimizers, schedulers and loaders."""
