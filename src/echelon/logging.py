"""Re-exports the names of ``accelerate.logging``."""

from echelon.accelerator.logging import MultiProcessAdapter as MultiProcessAdapter, get_logger as get_logger
