"""Provides the names in ``accelerate.logging``, implemented by echelon."""

from echelon.accelerator.logging import MultiProcessAdapter as MultiProcessAdapter, get_logger as get_logger
