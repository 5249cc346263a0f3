"""Provides the names in ``accelerate.commands.config``, implemented by echelon."""

from echelon.config.cluster import load_config_from_file as load_config_from_file
from echelon.config.write import default_config_file as default_config_file
