"""Re-exports the names of ``accelerate.local_sgd``."""

from echelon.accelerator.update.local_sgd import LocalSGD as LocalSGD
