"""The names of ``accelerate.commands.config.default``, so that its scripts run: re-exports only."""

from __future__ import annotations

from echelon.config.first_config import write_basic_config

__all__ = ["write_basic_config"]
