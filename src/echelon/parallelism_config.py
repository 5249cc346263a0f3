"""Re-exports the names of ``accelerate.parallelism_config``."""

from echelon.accelerator.plugins.parallelism_config import ParallelismConfig as ParallelismConfig
