"""Re-exports the names of ``accelerate.commands.config.default``."""

from echelon.config.first_config import write_basic_config as write_basic_config
