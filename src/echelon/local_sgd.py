"""Provides the names in ``accelerate.local_sgd``, implemented by echelon."""

from echelon.accelerator.update.local_sgd import LocalSGD as LocalSGD
