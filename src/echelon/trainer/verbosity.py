"""How much echelon says: the log level of the arguments, and a place for the lines where the program has none."""

from __future__ import annotations

import logging

__all__ = ["speak_at"]


def speak_at(level: int) -> None:
    """Set the level of echelon's loggers; without any handler in the program, lines go to stderr as they are."""
    logger = logging.getLogger("echelon")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
