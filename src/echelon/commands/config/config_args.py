"""Provides the names in ``accelerate.commands.config.config_args``, implemented by echelon."""

from echelon.compat import unsupported as _unsupported
from echelon.config.cluster import ClusterConfig as ClusterConfig, load_config_from_file as load_config_from_file
from echelon.config.write import default_config_file as default_config_file

_unsupported.add_names(globals())
