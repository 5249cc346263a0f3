"""Re-exports the names of ``accelerate.scheduler``."""

from echelon.accelerator.update.scheduler import AcceleratedScheduler as AcceleratedScheduler
