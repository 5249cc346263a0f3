"""echelon's log level."""

from __future__ import annotations

import logging

__all__ = ["set_log_level"]


def set_log_level(level: int) -> None:
    """Set the level of echelon's loggers, and log to stderr if the program has no handler."""
    logger = logging.getLogger("echelon")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
