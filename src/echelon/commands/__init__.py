"""The names of ``accelerate.commands``."""
