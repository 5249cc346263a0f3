"""Provides the names in ``accelerate.scheduler``, implemented by echelon."""

from echelon.accelerator.update.scheduler import AcceleratedScheduler as AcceleratedScheduler
