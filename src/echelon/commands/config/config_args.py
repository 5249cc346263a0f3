"""The names of ``accelerate.commands.config.config_args``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.compat.accelerate_unsupported import BaseConfig, SageMakerConfig
from echelon.config.cluster import ClusterConfig, load_config_from_file
from echelon.config.first_config import default_config_file

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "default_config_file",
    "load_config_from_file",
]
