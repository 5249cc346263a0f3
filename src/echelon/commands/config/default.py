"""Provides the names in ``accelerate.commands.config.default``, implemented by echelon."""

from echelon.config.write import write_basic_config as write_basic_config
