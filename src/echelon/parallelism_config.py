"""Provides the names in ``accelerate.parallelism_config``, implemented by echelon."""

from echelon.accelerator.plugins.parallelism_config import ParallelismConfig as ParallelismConfig
