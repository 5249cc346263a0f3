"""Re-exports the names of ``accelerate.commands``."""
