"""The names of ``accelerate.commands.config``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.config.cluster import load_config_from_file
from echelon.config.first_config import default_config_file

__all__ = [
    "default_config_file",
    "load_config_from_file",
]
